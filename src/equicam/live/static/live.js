// The live look: one loop requests maps, the dial's angle first, then the rest of a ring of angles.

const csrf = document.querySelector('meta[name="equicam"]').dataset.csrf;
const STEP = 5; // degrees of the dial
const RING = 15; // degrees between the angles computed in advance
const REST_MS = 220; // the dial rests after so long without a change
const PLAY_MS = 320;
const VIEWS = [4, 6, 8, 12, 18, 24, 36, 72];
const SIDES = ["single", "fused"];
const $ = (id) => document.getElementById(id);

let setup;
let image; // as /api/image describes it
let chosen; // target, layer, method, views
let angle = 0;
let moved = 0; // when the dial changed last
let frames = { single: new Map(), fused: new Map() }; // by angle
let failed = false; // the settings as they are cannot be computed
let ringOn = true;
let playing = null;
let busy = null; // the request in progress
let shown = { single: null, fused: null };

// Coarse angles first, so that a part of the ring is soon useful.
const ringAngles = () => {
  const found = [];
  for (const step of [180, 90, 45, 30, RING]) for (let a = 0; a < 360; a += step) if (!found.includes(a)) found.push(a);
  return found;
};
const RING_ANGLES = ringAngles();

const announce = (message) => {
  $("live").textContent = "";
  setTimeout(() => ($("live").textContent = message), 30);
};
const showError = (message) => {
  $("error").textContent = message || "";
  $("error").hidden = !message;
};
const request = async (address, options = {}) => {
  let response;
  try {
    response = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is equicam open still running?");
  }
  if (response.ok) return response.json(); // an abort while it arrives is an error too
  const data = await response.json().catch(() => ({}));
  throw new Error(data.error || "The server refused it.");
};
const element = (tag, text, attributes = {}) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};
const svg = (tag, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const number = (value, digits) => (value === null || value === undefined ? "undefined" : value.toFixed(digits));

// Names of classes are not always unique.
const labels = [];
const nameClasses = (classes) => {
  const count = {};
  for (const name of classes) count[name] = (count[name] || 0) + 1;
  classes.forEach((name, i) => labels.push(count[name] > 1 ? `${name} (${i})` : name));
};
const className = (index) => labels[index] ?? `${setup.explains} ${index}`;
const classIndex = (text) => {
  const found = labels.indexOf(text);
  if (found >= 0) return found;
  const plain = /^(?:class |output )?(\d+)$/.exec(text.trim());
  if (plain && (!labels.length || Number(plain[1]) < labels.length)) return Number(plain[1]);
  const lower = text.trim().toLowerCase();
  if (!lower) return null;
  const begins = labels.findIndex((label) => label.toLowerCase().startsWith(lower));
  const close = begins >= 0 ? begins : labels.findIndex((label) => label.toLowerCase().includes(lower));
  return close >= 0 ? close : null;
};
const methodNamed = (name) => setup.methods.find((one) => one.name === name);
const TITLES = { "grad-cam": "Grad-CAM", "equigrad-cam": "EquiGrad-CAM" };
const title = (name) => TITLES[name] || name;

// What is computed next: the dial's angle, then the ring; null for nothing.
const nextTask = () => {
  if (!image || failed) return null;
  const rested = Date.now() - moved >= REST_MS;
  if (!frames.single.has(angle)) return { side: "single", at: angle };
  if (!rested) return null;
  if (!frames.fused.has(angle)) return { side: "fused", at: angle };
  if (!ringOn) return null;
  for (const at of RING_ANGLES) for (const side of SIDES) if (!frames[side].has(at)) return { side, at };
  return null;
};

let wake = () => {};
const sleep = (ms) =>
  new Promise((resolve) => {
    wake = resolve;
    setTimeout(resolve, ms);
  });

const computeLoop = async () => {
  for (;;) {
    const task = nextTask();
    if (!task) {
      await sleep(REST_MS / 2);
      continue;
    }
    const target = frames; // settings that change meanwhile start with new ones
    busy = { ...task, abort: new AbortController() };
    render();
    try {
      const views = task.side === "single" ? 1 : chosen.views;
      const query = new URLSearchParams({ ...chosen, views, image: image.id, angle: task.at });
      const facts = await request(`/api/frame?${query}`, { signal: busy.abort.signal });
      if (!facts.superseded) target[task.side].set(task.at, facts); // otherwise the loop asks again
      if (target === frames) showError("");
    } catch (error) {
      if (error.name !== "AbortError" && target === frames) {
        failed = true;
        ringOn = false;
        showError(error.message);
      }
    }
    busy = null;
    render();
  }
};

const distance = (a, b) => Math.min((a - b + 360) % 360, (b - a + 360) % 360);
const nearest = (side) => {
  let best = null;
  for (const at of frames[side].keys()) if (best === null || distance(at, angle) < distance(best, angle)) best = at;
  return best === null ? null : frames[side].get(best);
};

const swap = async (panel, kind, source) => {
  const before = panel.querySelector(`img.${kind}`);
  const fresh = new Image();
  fresh.className = kind;
  fresh.alt = before.alt;
  fresh.src = source;
  fresh.style.opacity = kind === "layer" && panel.closest(".stage") ? $("opacity").value / 100 : "";
  await fresh.decode();
  return () => panel.querySelector(`img.${kind}`).replaceWith(fresh);
};
const showFrame = async (panel, facts, kind = "map") => {
  const swaps = await Promise.all([
    swap(panel, "input", `/image/input/${image.id}/${facts.angle}`),
    swap(panel, "layer", `/image/${facts.key}/${kind}`),
  ]);
  for (const one of swaps) one(); // image and map change together
};

const renderPanel = (side) => {
  const panel = $(side);
  const find = (name) => panel.querySelector(`[data-${name}]`);
  const facts = nearest(side);
  const views = side === "single" ? "one view" : `${chosen.views} views`;
  find("name").textContent = title(side === "single" ? methodNamed(chosen.method).single : chosen.method);
  find("views").textContent = views;
  find("busy").hidden = frames[side].has(angle) || failed;
  if (!facts) return;
  const exact = facts.angle === angle;
  const reference = facts.angle === 0 ? ", the reference" : "";
  find("at").textContent = exact ? `at ${facts.angle}°${reference}` : `at ${facts.angle}°, the nearest computed`;
  find("at").classList.toggle("waits", !exact);
  find("eq").textContent = facts.eq === null ? "undefined" : facts.angle === 0 ? "1" : facts.eq.toFixed(2);
  const flips = facts.top1.index !== chosen.target;
  find("prediction").textContent = facts.value !== null
    ? `${className(chosen.target)} = ${facts.value.toPrecision(4)}`
    : flips
    ? `predicts ${facts.top1.name}; ${className(chosen.target)} has p = ${facts.confidence.toFixed(2)}`
    : `predicts ${facts.top1.name}, p = ${facts.confidence.toFixed(2)}`;
  find("prediction").classList.toggle("flips", flips);
  if (shown[side] === facts.key) return;
  shown[side] = facts.key;
  showFrame(panel, facts).catch(() => {
    if (shown[side] === facts.key) shown[side] = null; // dropped by the server: computed again when needed
  });
};

const renderDial = () => {
  $("hand").setAttribute("transform", `rotate(${-angle} 80 80)`);
  $("degrees").textContent = `${angle}°`;
  $("dial").setAttribute("aria-valuenow", angle);
  $("dial").setAttribute("aria-valuetext", `${angle} degrees counter-clockwise`);
  for (const tick of $("ticks").children) tick.classList.toggle("done", frames.fused.has(Number(tick.dataset.at)));
};

const renderChart = () => {
  const width = Math.max(280, Math.round($("chart").clientWidth) || 720); // a unit is a pixel, so that text has its size on any screen
  const [height, left, right, top, bottom] = [190, 50, 12, 10, 44];
  const low = -0.2;
  const x = (a) => left + ((width - left - right) * a) / 360;
  const y = (r) => top + ((height - top - bottom) * (1 - Math.max(r, low))) / (1 - low);
  const parts = [];
  for (const r of [0, 0.5, 1]) {
    parts.push(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(r), y2: y(r) }));
    parts.push(svg("text", { x: left - 6, y: y(r) + 4, "text-anchor": "end" }, r));
  }
  const step = width < 480 ? 90 : 45;
  for (let a = 0; a <= 360; a += step) parts.push(svg("text", { x: x(a), y: height - bottom + 16, "text-anchor": a === 360 ? "end" : "middle" }, `${a}°`));
  parts.push(svg("text", { class: "axis", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "angle of rotation (°)"));
  parts.push(svg("text", { class: "axis", transform: `translate(14 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "Eq (equivariance)"));
  parts.push(svg("line", { class: "now", x1: x(angle), x2: x(angle), y1: top, y2: height - bottom }));
  const keys = [];
  for (const side of SIDES) {
    const known = [...frames[side].values()].filter((one) => one.eq !== null).sort((a, b) => a.angle - b.angle);
    const line = known.map((one) => [one.angle, one.eq]);
    if (line.length && line[0][0] === 0) line.push([360, 1]);
    parts.push(svg("polyline", { class: side, points: line.map(([a, r]) => `${x(a).toFixed(1)},${y(r).toFixed(1)}`).join(" ") }));
    for (const [a, r] of line) {
      const [h, v] = [x(a), y(r)];
      const mark = side === "single" ? svg("path", { d: `M${h} ${v - 4.5}l4.5 4.5l-4.5 4.5l-4.5-4.5z` }) : svg("circle", { cx: h, cy: v, r: 3.4 });
      mark.setAttribute("class", `mark ${side}`);
      mark.append(svg("title", {}, `${a}°: ${r.toFixed(2)}`));
      parts.push(mark);
    }
    const rotated = known.filter((one) => one.angle !== 0 && SIDES.every((other) => (frames[other].get(one.angle)?.eq ?? null) !== null));
    const mean = rotated.length ? (rotated.reduce((sum, one) => sum + one.eq, 0) / rotated.length).toFixed(2) : "–";
    const item = element("li", `${title(side === "single" ? methodNamed(chosen.method).single : chosen.method)}: mean `, { class: side });
    item.append(element("b", mean), ` over ${rotated.length} ${rotated.length === 1 ? "angle" : "angles"}`);
    keys.push(item);
  }
  $("chart").setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("chart").replaceChildren(...parts);
  $("key").replaceChildren(...keys);
  const done = RING_ANGLES.filter((at) => frames.fused.has(at)).length;
  $("progress").textContent = `${done} of ${RING_ANGLES.length} angles computed`;
  $("ring").hidden = done === RING_ANGLES.length;
  $("ring").textContent = ringOn ? "Stop" : "Compute the others";
  $("ring").setAttribute("aria-pressed", ringOn);
};

const fact = (term, value, explanation) => {
  const shownValue = element("dd", value);
  if (explanation) shownValue.append(" ", element("span", explanation, { class: "soft" }));
  return [element("dt", term), shownValue];
};
let described = null;
const renderFacts = () => {
  const facts = frames.fused.get(0);
  if (described === (facts?.key ?? null)) return;
  described = facts?.key ?? null;
  $("peum").hidden = !facts;
  if (!facts) {
    $("facts").replaceChildren(...fact("", "computing …"));
    $("flags").replaceChildren();
    $("curve").replaceChildren();
    $("steadiness").hidden = true;
    return;
  }
  $("facts").replaceChildren(
    ...fact("Stability", number(facts.stability, 2), "mean correlation of the views’ own maps with that at 0°"),
    ...fact("PEUM", number(facts.peum_score, 4), `per-image explanation uncertainty: variance of the ${facts.views} views’ aligned maps; it depends on their number`),
    ...(facts.value === null
      ? [...fact("Flips", `${facts.flips} of ${facts.views}`, "views that change the prediction"), ...fact("p", number(facts.confidence, 3), `of ${className(chosen.target)}`)]
      : fact("Value", facts.value.toPrecision(4), `of ${className(chosen.target)}`)),
  );
  $("flags").replaceChildren(...Object.entries(facts.flags).map(([name, about]) => element("span", name, { class: "flag", title: about })));
  $("steadiness").hidden = !facts.steadiness;
  if (facts.steadiness) {
    $("steadiness").replaceChildren(`${title(methodNamed(chosen.method).single)}: `, element("b", facts.steadiness.word), ` ${facts.steadiness.reason}`);
    $("steadiness").className = `steadiness ${facts.steadiness.word.replace(" ", "-")}`;
  }
  $("curve").innerHTML = facts.curve; // numbers alone, written by the server
  $("curve").append(element("figcaption", "Correlation of each view’s own map, aligned, with that of the view at 0°; triangles: below 0.5. Stability is their mean.", { class: "soft" }));
  showFrame($("peum"), facts, "peum").catch(() => {});
};

const render = () => {
  if (!image) return;
  for (const side of SIDES) renderPanel(side);
  renderDial();
  renderChart();
  renderFacts();
};

const restart = () => {
  busy?.abort.abort();
  frames = { single: new Map(), fused: new Map() };
  shown = { single: null, fused: null };
  failed = false;
  ringOn = true;
  showError("");
  $("class").value = className(chosen.target);
  $("layer").value = chosen.layer;
  $("about").textContent = methodNamed(chosen.method).about;
  for (const button of $("top").children) button.setAttribute("aria-pressed", Number(button.dataset.index) === chosen.target);
  render();
  wake();
};

const rotateTo = (degrees) => {
  angle = (((Math.round(degrees / STEP) * STEP) % 360) + 360) % 360;
  moved = Date.now();
  if (busy?.side === "fused" && busy.at !== angle) busy.abort.abort(); // a map of one view is soon there
  render();
  wake();
};

const stopPlaying = () => {
  clearInterval(playing);
  playing = null;
  $("play").setAttribute("aria-pressed", "false");
};
const play = () => {
  if (playing) return stopPlaying();
  $("play").setAttribute("aria-pressed", "true");
  playing = setInterval(() => {
    if (!frames.single.has(angle) || !frames.fused.has(angle)) return; // waits for both maps
    rotateTo(Math.floor(angle / RING) * RING + RING);
    moved = 0;
  }, PLAY_MS);
};

const listImages = () => {
  $("images").replaceChildren(...setup.images.map((one) => element("option", one.name, { value: one.id })));
  $("chooser").hidden = setup.images.length < 2;
  if (image) $("images").value = image.id;
};
const openImage = async (id) => {
  busy?.abort.abort();
  stopPlaying();
  image = null;
  try {
    image = await request(`/api/image/${id}`);
  } catch (error) {
    showError(error.message);
    return;
  }
  angle = 0;
  chosen = { ...chosen, target: image.top[0]?.index ?? 0 };
  $("empty").hidden = true;
  $("look").hidden = false;
  $("title").textContent = image.name;
  $("subtitle").textContent = `${image.size[0]} × ${image.size[1]} px; the model sees ${image.input[0]} × ${image.input[1]}, shown here`;
  const buttons = image.top.map((one) => {
    const button = element("button", undefined, { type: "button", "data-index": one.index });
    button.append(element("span", className(one.index)), element("span", one.confidence.toFixed(2), { class: "soft" }));
    button.addEventListener("click", () => choose({ target: one.index }));
    return button;
  });
  $("top").replaceChildren(...buttons);
  if (setup.images.some((one) => one.id === id)) $("images").value = id;
  announce(`${image.name} is open.`);
  restart();
};
const choose = (change) => {
  chosen = { ...chosen, ...change };
  restart();
};

const send = async (file) => {
  if (file.size > setup.max_upload_bytes) {
    showError(`${file.name} has ${Math.ceil(file.size / 2 ** 20)} MiB; at most ${setup.max_upload_bytes / 2 ** 20} can be dropped. Name larger files on the command line.`);
    return;
  }
  showError("");
  try {
    const added = await request(`/api/image?name=${encodeURIComponent(file.name.slice(0, 200))}`, {
      method: "POST",
      headers: { "content-type": "application/octet-stream", "x-equicam-csrf": csrf },
      body: file,
    });
    setup.images.push(added);
    listImages();
    await openImage(added.id);
  } catch (error) {
    showError(error.message);
  }
};

const addDial = () => {
  const dial = $("dial");
  for (const at of [...RING_ANGLES].sort((a, b) => a - b)) {
    const length = at % 45 ? 5 : 9;
    $("ticks").append(svg("line", { x1: 80, x2: 80, y1: 6, y2: 6 + length, transform: `rotate(${-at} 80 80)`, "data-at": at }));
  }
  const follow = (event) => {
    const box = dial.getBoundingClientRect();
    const [right, down] = [event.clientX - box.left - box.width / 2, event.clientY - box.top - box.height / 2];
    rotateTo((Math.atan2(-right, -down) * 180) / Math.PI);
  };
  dial.addEventListener("pointerdown", (event) => {
    dial.setPointerCapture(event.pointerId);
    stopPlaying();
    follow(event);
  });
  dial.addEventListener("pointermove", (event) => dial.hasPointerCapture(event.pointerId) && follow(event));
  dial.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: STEP, ArrowUp: STEP, ArrowRight: -STEP, ArrowDown: -STEP, PageUp: 45, PageDown: -45 }[event.key];
    if (by === undefined && event.key !== "Home") return;
    event.preventDefault();
    stopPlaying();
    rotateTo(event.key === "Home" ? 0 : angle + by);
  });
};

const addDrop = () => {
  let depth = 0;
  const hasFiles = (event) => [...(event.dataTransfer?.types || [])].includes("Files");
  addEventListener("dragenter", (event) => hasFiles(event) && ($("dropping").hidden = ++depth < 1));
  addEventListener("dragleave", (event) => hasFiles(event) && ($("dropping").hidden = --depth < 1));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    $("dropping").hidden = true;
    if (event.dataTransfer.files.length) send(event.dataTransfer.files[0]);
  });
  for (const id of ["pick", "pick-first"]) $(id).addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => {
    if ($("file").files.length) send($("file").files[0]);
    $("file").value = "";
  });
};

const addSettings = () => {
  $("classes").append(...labels.map((name) => element("option", undefined, { value: name })));
  $("layers").append(...setup.layers.map((name) => element("option", undefined, { value: name })));
  $("method").append(...setup.methods.map((one) => element("option", one.name, { value: one.name })));
  const views = [...new Set([...VIEWS, chosen.views])].sort((a, b) => a - b);
  $("views").append(...views.map((count) => element("option", count, { value: count })));
  $("method").value = chosen.method;
  $("views").value = chosen.views;
  $("method").addEventListener("change", () => choose({ method: $("method").value }));
  $("views").addEventListener("change", () => choose({ views: Number($("views").value) }));
  $("class").addEventListener("focus", () => $("class").select());
  $("class").addEventListener("change", () => {
    const index = classIndex($("class").value);
    if (index === null) showError(`There is no ${setup.explains} ${$("class").value}.`);
    else choose({ target: index });
  });
  $("layer").addEventListener("focus", () => $("layer").select());
  $("layer").addEventListener("change", () => {
    if (setup.layers.includes($("layer").value)) choose({ layer: $("layer").value });
    else showError(`There is no layer ${$("layer").value} with a spatial output.`);
  });
  $("images").addEventListener("change", () => openImage($("images").value));
};

const addTools = () => {
  const toggleOverlay = () => {
    const on = document.body.classList.toggle("no-overlay");
    $("overlay").setAttribute("aria-pressed", !on);
  };
  $("overlay").addEventListener("click", toggleOverlay);
  $("opacity").addEventListener("input", () => {
    for (const layer of document.querySelectorAll(".stage .layer, .ramp .layer")) layer.style.opacity = $("opacity").value / 100;
  });
  $("play").addEventListener("click", play);
  $("ring").addEventListener("click", () => {
    ringOn = !ringOn;
    failed = false;
    if (!ringOn && busy && busy.at !== angle) busy.abort.abort();
    render();
    wake();
  });
  $("help-open").addEventListener("click", () => $("help").showModal());
  window.addEventListener("resize", () => image && renderChart());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || event.target.matches?.("input:not([type=range]), select")) return;
    const action = { o: toggleOverlay, p: play, "?": () => $("help").showModal() }[event.key.toLowerCase()];
    if (!action || (event.key.toLowerCase() === "p" && !image)) return;
    event.preventDefault();
    action();
  });
};

const start = async () => {
  setup = await request("/api/setup");
  chosen = setup.chosen;
  nameClasses(setup.classes);
  $("class-label").textContent = setup.explains === "class" ? "Class" : "Output";
  $("model").textContent = `${setup.model}, ${setup.device}`;
  addDial();
  addDrop();
  addSettings();
  addTools();
  listImages();
  computeLoop();
  if (setup.images.length) await openImage(setup.images[0].id);
  $("empty").hidden = Boolean(image) || !$("look").hidden;
};
start().catch((error) => showError(error.message));
