"""One model from the first observation on: exact while that is cheapest, then a streaming one."""
