// The queue: only the cards in sight are in the page, whatever the number of pictures.

import { announce, ask, flush, send, trouble, typing } from "./review.js";

const $ = (id) => document.getElementById(id);
const list = $("list");
const CHUNK = 60;
const KEPT = 40; // chunks held at once
const VERDICTS = [...document.querySelectorAll("#meter i")].map((one) => one.dataset.verdict);
const LABELS = Object.fromEntries([...document.querySelectorAll("#filters select[name=verdict] option")].map((o) => [o.value, o.textContent]));
const angles = list.dataset.angles.split(" ");

let chunks = new Map();
let asked = new Set();
let cards = new Map();
let version = null;
let matching = 0;
let at = Number(new URLSearchParams(location.hash.slice(1)).get("at")) || 0;
let overlay = localStorage.getItem("equicam-overlay") !== "off";
let view = -1;
let columns = 1;
let side = 176;
let tall = 220;

const filters = () => {
  const found = new URLSearchParams();
  for (const [name, value] of new FormData($("filters"))) if (value) found.set(name, value);
  return found;
};
const query = () => (filters().size ? `?${filters()}` : "");
const entry = (index) => chunks.get(Math.floor(index / CHUNK))?.[index % CHUNK];
const source = (one) => `/picture/${one.key}/${overlay ? (view < 0 ? "thumb" : `thumb-${view}`) : "bare"}`;

const load = async (number) => {
  if (chunks.has(number) || asked.has(number)) return;
  asked.add(number);
  const wanted = filters();
  wanted.set("offset", number * CHUNK);
  wanted.set("limit", CHUNK);
  const stamp = query();
  try {
    const told = await ask(`/api/queue?${wanted}`);
    if (stamp !== query()) return;
    if (version && told.version !== version) {
      chunks.clear();
      announce("The queue was ranked anew.");
    }
    version = told.version;
    chunks.set(number, told.items);
    while (chunks.size > KEPT) chunks.delete(chunks.keys().next().value);
    if (told.matching !== matching || number === 0) {
      matching = told.matching;
      measure();
    }
    draw();
  } catch (error) {
    trouble(error.message);
  } finally {
    asked.delete(number);
  }
};

const measure = () => {
  const wide = list.clientWidth;
  const least = wide < 700 ? 150 : 176;
  columns = Math.max(2, Math.floor((wide + 12) / (least + 12)));
  side = (wide - 12 * (columns - 1)) / columns;
  tall = side + 44;
  list.style.height = `${Math.ceil(matching / columns) * (tall + 12)}px`;
  $("matching").textContent = `${matching.toLocaleString("en")} ${matching === 1 ? "picture" : "pictures"}`;
  $("empty").hidden = matching > 0;
  at = Math.max(0, Math.min(at, matching - 1));
};

// Of a long path the end tells more than the beginning.
const ending = (name) => {
  const letters = [...name];
  const most = Math.floor((side - 70) / 8);
  return letters.length > most ? `…${letters.slice(1 - most).join("")}` : name;
};

const card = (index) => {
  const item = document.createElement("li");
  const link = document.createElement("a");
  const photo = document.createElement("img");
  const foot = document.createElement("span");
  const badge = document.createElement("i");
  const words = document.createElement("bdi");
  link.className = "thumb";
  photo.alt = "";
  photo.decoding = "async";
  photo.draggable = false;
  foot.className = "foot";
  badge.className = "dot";
  foot.append(badge, words);
  link.append(photo, foot);
  item.append(link);
  link.addEventListener("focus", () => select(index, false));
  list.append(item);
  return { item, link, photo, badge, words };
};

const paint = (made, index) => {
  const one = entry(index);
  made.item.style.transform = `translate(${(index % columns) * (side + 12)}px, ${Math.floor(index / columns) * (tall + 12)}px)`;
  made.item.style.width = `${side}px`;
  made.item.style.height = `${tall}px`;
  made.item.setAttribute("aria-setsize", matching);
  made.item.setAttribute("aria-posinset", index + 1);
  made.link.tabIndex = index === at ? 0 : -1;
  made.item.classList.toggle("at", index === at);
  if (!one) return;
  const href = `/item/${one.key}${query()}`;
  if (made.link.getAttribute("href") !== href) made.link.setAttribute("href", href);
  if (made.photo.getAttribute("src") !== source(one)) made.photo.src = source(one);
  const label = one.verdict ? LABELS[one.verdict] : one.second ? "second reader asked for" : "not read";
  made.badge.className = `dot ${one.verdict ? `v-${one.verdict}` : one.second ? "asked" : "none"}`;
  made.words.textContent = `${one.place.toLocaleString("en")}${one.name ? ` · ${ending(one.name)}` : ""}`;
  made.words.title = one.name || "";
  const flags = one.flags.length ? `, flags: ${one.flags.join(", ")}` : "";
  made.link.setAttribute("aria-label", `Picture ${one.place}${one.name ? `, ${one.name}` : ""}${one.class ? `, predicted ${one.class}` : ""}, ${label}${flags}`);
};

const draw = () => {
  const top = list.getBoundingClientRect().top;
  const first = Math.max(0, Math.floor(-top / (tall + 12)) - 1);
  const last = Math.ceil((innerHeight - top) / (tall + 12)) + 1;
  const from = first * columns;
  const to = Math.min(matching, last * columns);
  for (const [index, made] of cards) {
    if ((index < from || index >= to) && made.link !== document.activeElement) {
      made.item.remove();
      cards.delete(index);
    }
  }
  for (let index = from; index < to; index += 1) {
    if (!cards.has(index)) cards.set(index, card(index));
    paint(cards.get(index), index);
  }
  for (let number = Math.floor(from / CHUNK); number * CHUNK < to; number += 1) load(number);
};

const remember = () => history.replaceState(null, "", `${location.pathname}${query()}#at=${at}`);

const select = (index, focus = true) => {
  if (!matching) return;
  const before = at;
  at = Math.max(0, Math.min(index, matching - 1));
  const row = list.getBoundingClientRect().top + Math.floor(at / columns) * (tall + 12);
  const head = document.querySelector(".bar").getBoundingClientRect().height + 8;
  if (row < head) scrollBy(0, row - head);
  else if (row + tall > innerHeight) scrollBy(0, row + tall - innerHeight + 12);
  if (before !== at) remember();
  draw();
  if (focus) cards.get(at)?.link.focus({ preventScroll: true });
};

const unread = async () => {
  for (let index = at + 1; index < matching; index += 1) {
    if (!entry(index)) await load(Math.floor(index / CHUNK));
    if (!entry(index)?.verdict) return select(index);
  }
  announce("No picture without your verdict from here on.");
};

const decide = async (verdict) => {
  const one = entry(at);
  if (!one) return;
  if (one.verdict) return announce("This picture has your verdict; open it to change it.");
  try {
    const told = await send(`/api/verdict${query()}`, { key: one.key, verdict, reason: "", seen: one.seen });
    Object.assign(one, told.entry);
    announce(`Saved: ${LABELS[verdict]}.`);
    draw();
    refresh();
  } catch (error) {
    trouble(error.message);
  }
};

const tally = (told) => {
  $("read").textContent = told.read.toLocaleString("en");
  $("meter").setAttribute("aria-valuenow", told.read);
  for (const verdict of VERDICTS) {
    const count = told.verdicts[verdict];
    document.querySelector(`[data-count="${verdict}"]`).textContent = count;
    document.querySelector(`#meter [data-verdict="${verdict}"]`).style.width = `${(100 * count) / Math.max(1, told.total)}%`;
  }
};

const refresh = async () => {
  try {
    const told = await ask("/api/progress");
    tally(told);
    if (version && told.version !== version) restart();
  } catch (error) {
    trouble(error.message);
  }
};

const restart = () => {
  chunks = new Map();
  asked = new Set();
  version = null;
  load(Math.floor(at / CHUNK));
  load(0);
};

const turn = (by) => {
  view = ((view + 1 + by + angles.length + 1) % (angles.length + 1)) - 1;
  overlay = true;
  shown();
  announce(view < 0 ? "All views together" : `View at ${angles[view]} degrees`);
};

const shown = () => {
  $("overlay").setAttribute("aria-pressed", overlay);
  $("angle").textContent = view < 0 ? "all views" : `view ${Number(angles[view])}°`;
  draw();
};

$("overlay").addEventListener("click", () => {
  overlay = !overlay;
  localStorage.setItem("equicam-overlay", overlay ? "on" : "off");
  shown();
});
$("angle-back").addEventListener("click", () => turn(-1));
$("angle-on").addEventListener("click", () => turn(1));
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("change", () => {
  at = 0;
  matching = 0;
  for (const made of cards.values()) made.item.remove();
  cards = new Map();
  remember();
  restart();
});

let waits = false;
addEventListener("scroll", () => {
  if (waits) return;
  waits = true;
  requestAnimationFrame(() => {
    waits = false;
    draw();
  });
}, { passive: true });
addEventListener("resize", () => {
  measure();
  draw();
});

document.addEventListener("keydown", (event) => {
  if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, j: 1, k: -1 };
  const number = Number(event.key);
  if (event.key in moves) select(at + moves[event.key]);
  else if (event.key === "Home") select(0);
  else if (event.key === "End") select(matching - 1);
  else if (number >= 1 && number <= VERDICTS.length) decide(VERDICTS[number - 1]);
  else if (event.key === "Enter" && (event.target === document.body || event.target.closest?.("#list"))) location.assign(cards.get(at)?.link.href || location.href);
  else if (event.key === "o") $("overlay").click();
  else if (event.key === "[" || event.key === "]") turn(event.key === "[" ? -1 : 1);
  else if (event.key === "u") unread();
  else if (event.key === "f") document.querySelector("#filters select").focus();
  else return;
  event.preventDefault();
});

const begin = async () => {
  shown();
  await flush();
  await load(0);
  const wanted = Number(new URLSearchParams(location.hash.slice(1)).get("at")) || 0;
  at = Math.min(wanted, Math.max(0, matching - 1));
  await load(Math.floor(at / CHUNK));
  select(at);
  refresh();
};
if ("scrollRestoration" in history) history.scrollRestoration = "manual";
setInterval(() => document.visibilityState === "visible" && refresh(), 10000);
begin();
