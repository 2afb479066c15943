// The zoomable map of a survey's report. It draws the sites of the page's own data on a canvas in
// place of the still picture; texts of tables are only ever drawn or set as text.
"use strict";
(() => {
  const figure = document.getElementById("map");
  const data = JSON.parse(document.getElementById("map-data").textContent);
  const make = (tag, name, parent, text = "") => {
    const made = parent.appendChild(document.createElement(tag));
    made.className = name;
    made.textContent = text;
    return made;
  };
  const stage = make("div", "stage", figure);
  const canvas = make("canvas", "canvas", stage);
  const pen = canvas.getContext("2d");
  if (!pen) {
    stage.remove();
    return;
  }
  const side = make("div", "side", figure);
  const layers = make("div", "layers", side);
  const legend = make("ul", "legend", side);
  const marks = make("ul", "legend", side);
  side.appendChild(figure.querySelector("figcaption"));
  make("p", "small", side, "Tap a site, or point at it, to read its name and numbers. Zoom by two " +
    "fingers, the buttons, or the wheel once the map was clicked.");
  const buttons = make("div", "zoom", stage);
  const card = make("div", "card", stage); // beside the map where there is room
  card.setAttribute("aria-live", "polite");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", figure.querySelector("img").alt);
  stage.style.aspectRatio = data.width + " / " + data.height;
  stage.style.setProperty("--aspect", data.width / data.height);
  figure.classList.add("live");

  const count = data.x.length;
  const order = new Map(data.next.map((site, place) => [site, place + 1]));
  let layer = data.layers[0];
  let chosen = -1; // the site whose card is shown
  let width = 0, height = 0, whole = 1; // in pixels of CSS; pixels of a kilometre at no zoom
  let scale = 1, left = 0, top = 0; // pixels of a kilometre; the upper left corner in kilometres

  // --- the view -----------------------------------------------------------------------------

  const across = (site) => (data.x[site] - left) * scale;
  const down = (site) => (data.y[site] - top) * scale;

  function keepInside() {
    scale = Math.min(Math.max(scale, whole), whole * data.zoom);
    const within = (start, room, extent) =>
      room >= extent ? (extent - room) / 2 : Math.min(Math.max(start, 0), extent - room);
    left = within(left, width / scale, data.width);
    top = within(top, height / scale, data.height);
    // a finger scrolls the page until there is something to move
    canvas.style.touchAction = scale > whole * 1.01 ? "none" : "pan-y";
  }

  function zoomAt(factor, x, y) {
    const before = scale;
    scale = Math.min(Math.max(scale * factor, whole), whole * data.zoom);
    left += x / before - x / scale;
    top += y / before - y / scale;
    redraw();
  }

  function showAll() {
    scale = whole;
    redraw();
  }

  function resize() {
    const around = window.matchMedia("(min-width: 52rem)").matches ? side : stage;
    if (card.parentNode !== around) around.appendChild(card);
    const former = { scale: scale / whole, x: left + width / scale / 2, y: top + height / scale / 2 };
    const first = width === 0;
    width = stage.clientWidth;
    height = stage.clientHeight;
    const dense = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    whole = Math.min(width / data.width, height / data.height);
    scale = first ? whole : whole * former.scale;
    left = former.x - width / scale / 2;
    top = former.y - height / scale / 2;
    draw();
  }

  // --- drawing ------------------------------------------------------------------------------

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  }

  function dotRadius() {
    const all = Math.min(Math.max(0.3 * data.apart * whole, 1.2), 5);
    return Math.min(all * Math.sqrt(scale / whole), 9);
  }

  function draw() {
    keepInside();
    pen.clearRect(0, 0, width, height);
    const radius = dotRadius();
    const seen = [];
    for (let site = 0; site < count; site++) {
      const x = across(site), y = down(site);
      if (x > -20 && y > -20 && x < width + 20 && y < height + 20) seen.push(site);
    }
    for (let colour = 0; colour < layer.colours.length; colour++) {
      pen.fillStyle = layer.colours[colour];
      pen.beginPath();
      for (const site of seen) {
        if (layer.index[site] !== colour) continue;
        pen.moveTo(across(site) + radius, down(site));
        pen.arc(across(site), down(site), radius, 0, 7);
      }
      pen.fill();
    }
    pen.strokeStyle = "#000";
    pen.lineWidth = 1.1;
    pen.beginPath();
    for (const site of seen) {
      if (!(site in data.results)) continue;
      const ring = Math.max(radius * 0.8, 1.8);
      pen.moveTo(across(site) + ring, down(site));
      pen.arc(across(site), down(site), ring, 0, 7);
    }
    pen.stroke();
    const taken = drawNumbers(seen);
    drawNames(seen, taken, radius);
    drawScale();
    if (chosen >= 0) {
      pen.lineWidth = 2.5;
      pen.strokeStyle = "#000";
      pen.beginPath();
      pen.arc(across(chosen), down(chosen), radius + 5, 0, 7);
      pen.stroke();
    }
  }

  const overlaps = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];

  // Number the sites to survey next; where discs would cover each other the later ones are dots
  // until there is room. Returns the boxes that are taken.
  function drawNumbers(seen) {
    const half = 9, inView = new Set(seen);
    const next = data.next.filter((site) => inView.has(site));
    const boxOf = (site) =>
      [across(site) - half, down(site) - half, across(site) + half, down(site) + half];
    const numbered = [];
    for (const site of next) {
      if (!numbered.some((other) => overlaps(boxOf(site), boxOf(other)))) numbered.push(site);
    }
    const disc = (site, radius) => {
      pen.beginPath();
      pen.arc(across(site), down(site), radius, 0, 7);
      pen.fill();
      pen.stroke();
    };
    pen.strokeStyle = "#fff";
    pen.lineWidth = 1.2;
    pen.fillStyle = "#000";
    for (const site of next) disc(site, 3.5);
    for (const site of numbered) disc(site, half);
    pen.font = "bold 11px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillStyle = "#fff";
    for (const site of numbered) pen.fillText(String(order.get(site)), across(site), down(site) + 0.5);
    const buttons = [width - 56, 0, width, 150], bar = [0, height - 32, width / 3 + 24, height];
    return [...numbered.map(boxOf), buttons, bar];
  }

  function drawNames(seen, taken, radius) {
    if (seen.length > 400 || (scale < whole * 1.5 && count > 40)) return;
    const dots = seen.map((site) => [
      across(site) - radius, down(site) - radius, across(site) + radius, down(site) + radius,
    ]);
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.lineWidth = 3;
    pen.strokeStyle = "#fff";
    pen.fillStyle = "#1b1b1b";
    const first = seen.filter((site) => order.has(site));
    for (const site of [...first, ...seen.filter((one) => !order.has(one))]) {
      const text = shortened(data.names[site]);
      const x = across(site) + Math.max(radius, order.has(site) ? 9 : 0) + 4, y = down(site);
      const box = [x, y - 8, x + pen.measureText(text).width, y + 8];
      if (box[2] > width || taken.some((other) => overlaps(box, other))) continue;
      if (dots.some((other) => overlaps(box, other))) continue;
      taken.push(box);
      pen.strokeText(text, x, y);
      pen.fillText(text, x, y);
    }
  }

  const shortened = (text) => (text.length > 24 ? text.slice(0, 23) + "\u2026" : text);

  function drawScale() {
    const most = width / 3 / scale, power = 10 ** Math.floor(Math.log10(most));
    const length = [5, 2, 1].find((step) => step * power <= most) * power;
    const y = height - 12;
    pen.strokeStyle = pen.fillStyle = "#1b1b1b";
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(12, y - 5);
    pen.lineTo(12, y);
    pen.lineTo(12 + length * scale, y);
    pen.lineTo(12 + length * scale, y - 5);
    pen.stroke();
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.textBaseline = "bottom";
    const text = length < 1 ? Math.round(1000 * length) + " m" : length + " km";
    pen.fillText(text, 16, y - 3);
  }

  // --- what is known of a site --------------------------------------------------------------

  const percent = (value) => value + "\u00a0%";

  function show(site) {
    if (site === chosen) return;
    chosen = site;
    card.replaceChildren();
    card.classList.toggle("open", site >= 0);
    if (site >= 0) {
      card.classList.toggle("low", down(site) < height / 2);
      make("strong", "", card, data.names[site]);
      for (const [heading, texts] of data.labels) {
        if (texts[site]) make("span", "", card, heading + ": " + texts[site]);
      }
      const span = percent(data.low[site]) + " to " + percent(data.high[site]);
      make("span", "", card, "Prevalence " + percent(data.mean[site]) + " (" + span + ")");
      if (data.chance) {
        const called = data.called[data.layers[0].index[site]];
        make("span", "", card, data.above + " with probability " + data.chance[site] + ": " + called);
      }
      make("span", "", card, data.results[site] || "not surveyed");
      if (order.has(site)) make("span", "", card, "No. " + order.get(site) + " of the sites to survey next");
      if (data.places) {
        const link = make("a", "", card, "Open in the phone's map");
        link.href = "geo:" + data.places[0][site] + "," + data.places[1][site];
      }
    }
    redraw();
  }

  function nearestTo(x, y, most) {
    let best = -1, least = most * most;
    for (let site = 0; site < count; site++) {
      const apart = (across(site) - x) ** 2 + (down(site) - y) ** 2;
      if (apart < least) {
        least = apart;
        best = site;
      }
    }
    return best;
  }

  // --- fingers, mouse, keys -----------------------------------------------------------------

  const held = new Map(); // positions of fingers, or of a pressed mouse
  let moved = 0, pinned = false;

  const middleOf = (points) => {
    const [a, b] = points.length > 1 ? points : [points[0], points[0]];
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, apart: Math.hypot(a.x - b.x, a.y - b.y) };
  };
  const placeOf = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (held.size === 0) moved = 0;
    held.set(event.pointerId, placeOf(event));
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const place = placeOf(event);
    if (!held.has(event.pointerId)) {
      if (event.pointerType === "mouse" && !pinned) show(nearestTo(place.x, place.y, 14));
      return;
    }
    const before = middleOf([...held.values()]);
    held.set(event.pointerId, place);
    const after = middleOf([...held.values()]);
    moved += Math.hypot(after.x - before.x, after.y - before.y) + Math.abs(after.apart - before.apart);
    if (moved < 5) return;
    left -= (after.x - before.x) / scale;
    top -= (after.y - before.y) / scale;
    zoomAt(before.apart > 0 && after.apart > 0 ? after.apart / before.apart : 1, after.x, after.y);
  });
  const release = (event) => {
    const tapped = held.delete(event.pointerId) && event.type === "pointerup" && moved < 5;
    if (!tapped || held.size > 0) return;
    const place = placeOf(event);
    const site = nearestTo(place.x, place.y, event.pointerType === "mouse" ? 14 : 26);
    pinned = site >= 0;
    show(site);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("touchmove", (event) => {
    if (event.touches.length > 1 && event.cancelable) event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => {
    const place = placeOf(event);
    zoomAt(2, place.x, place.y);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls
    event.preventDefault();
    const place = placeOf(event);
    zoomAt(Math.exp(-event.deltaY / 300), place.x, place.y);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = 60 / scale;
    const act = {
      "+": () => zoomAt(1.5, width / 2, height / 2),
      "=": () => zoomAt(1.5, width / 2, height / 2),
      "-": () => zoomAt(1 / 1.5, width / 2, height / 2),
      "0": showAll,
      ArrowLeft: () => { left -= step; redraw(); },
      ArrowRight: () => { left += step; redraw(); },
      ArrowUp: () => { top -= step; redraw(); },
      ArrowDown: () => { top += step; redraw(); },
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });

  for (const [text, what, act] of [
    ["+", "Zoom in", () => zoomAt(2, width / 2, height / 2)],
    ["\u2212", "Zoom out", () => zoomAt(0.5, width / 2, height / 2)],
    ["\u2922", "Show the whole map", showAll],
  ]) {
    const button = make("button", "", buttons, text);
    button.type = "button";
    button.title = what;
    button.setAttribute("aria-label", what);
    button.addEventListener("click", act);
  }

  function choose(which) {
    layer = which;
    legend.replaceChildren();
    for (const [text, colour] of layer.legend) {
      const line = make("li", "", legend);
      make("span", "swatch", line).style.background = colour;
      line.append(text);
    }
    for (const button of layers.children) {
      button.setAttribute("aria-pressed", String(button.textContent === layer.name));
    }
    redraw();
  }
  for (const [text, kind] of data.marks) {
    const line = make("li", "", marks);
    make("span", "swatch " + kind, line);
    line.append(text);
  }
  for (const which of data.layers) {
    const button = make("button", "", layers, which.name);
    button.type = "button";
    button.addEventListener("click", () => choose(which));
  }
  choose(layer);
  new ResizeObserver(resize).observe(stage);
  resize();
})();
