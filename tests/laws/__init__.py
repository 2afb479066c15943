"""What every model obeys: cases, laws, one file a subject, and their product."""
