// The queue: only the cards in sight are in the page, whatever the number of images.

import { announce, getJson, isTyping, send, sendUnsent, showError } from "./review.js";

const $ = (id) => document.getElementById(id);
const list = $("list");
const CHUNK = 60; // items in one request
const MAX_CHUNKS = 40; // held at once
const GAP = 12; // pixels between cards
const VERDICTS = [...document.querySelectorAll("#meter i")].map((one) => one.dataset.verdict);
const LABELS = Object.fromEntries([...document.querySelectorAll("#filters select[name=verdict] option")].map((o) => [o.value, o.textContent]));
const blind = document.querySelector('meta[name="equicam"]').dataset.blind;
const views = JSON.parse(list.dataset.views); // labels

let chunks = new Map();
let loading = new Set();
let cards = new Map();
let version = null;
let matching = 0;
let current = 0;
let overlay = localStorage.getItem("equicam-overlay") !== "off";
let view = -1; // -1: all views together
let columns = 1;
let cardWidth = 176;
let cardHeight = 220;

const filters = () => {
  const found = new URLSearchParams();
  for (const [name, value] of new FormData($("filters"))) if (value) found.set(name, value);
  return found;
};
const query = () => (filters().size ? `?${filters()}` : "");
const itemAt = (index) => chunks.get(Math.floor(index / CHUNK))?.[index % CHUNK];
// Under blinding the views of an image are shown after the verdict on it.
const hasViews = (item) => item.verdict || !blind;
const thumbnail = (item) => `/image/${item.key}/${overlay ? (view < 0 || !hasViews(item) ? "thumb" : `thumb-${view}`) : "thumb-plain"}`;
const indexInHash = () => Number(new URLSearchParams(location.hash.slice(1)).get("at")) || 0;

const load = async (number) => {
  if (chunks.has(number) || loading.has(number)) return;
  loading.add(number);
  const parameters = filters();
  parameters.set("offset", number * CHUNK);
  parameters.set("limit", CHUNK);
  const queryBefore = query();
  try {
    const data = await getJson(`/api/queue?${parameters}`);
    if (queryBefore !== query()) return;
    if (version && data.version !== version) {
      chunks.clear();
      announce("The queue was ranked again.");
    }
    version = data.version;
    chunks.set(number, data.items);
    while (chunks.size > MAX_CHUNKS) chunks.delete(chunks.keys().next().value);
    if (data.matching !== matching || number === 0) {
      matching = data.matching;
      measure();
    }
    draw();
  } catch (error) {
    showError(error.message);
  } finally {
    loading.delete(number);
  }
};

const measure = () => {
  const width = list.clientWidth;
  const least = width < 700 ? 150 : 216;
  columns = Math.max(2, Math.floor((width + GAP) / (least + GAP)));
  cardWidth = (width - GAP * (columns - 1)) / columns;
  cardHeight = cardWidth + 54;
  list.style.height = `${Math.ceil(matching / columns) * (cardHeight + GAP)}px`;
  $("matching").textContent = `${matching.toLocaleString("en")} ${matching === 1 ? "image" : "images"}`;
  $("empty").hidden = matching > 0;
  current = Math.max(0, Math.min(current, matching - 1));
};

// The end of a long path, because files of one folder begin alike.
const shorten = (name) => {
  const letters = [...name];
  const most = Math.floor((cardWidth - 40) / 7);
  return letters.length > most ? `…${letters.slice(1 - most).join("")}` : name;
};

const addCard = (index) => {
  const entry = document.createElement("li");
  const link = document.createElement("a");
  const image = document.createElement("img");
  const caption = document.createElement("span");
  const badge = document.createElement("i");
  const label = document.createElement("bdi");
  const name = document.createElement("small");
  link.className = "thumb";
  image.alt = "";
  image.decoding = "async";
  image.draggable = false;
  caption.className = "caption";
  badge.className = "dot";
  name.dir = "auto";
  caption.append(badge, label, name);
  link.append(image, caption);
  entry.append(link);
  link.addEventListener("focus", () => select(index, false));
  list.append(entry);
  return { entry, link, image, badge, label, name };
};

const fillCard = (card, index) => {
  const item = itemAt(index);
  card.entry.style.transform = `translate(${(index % columns) * (cardWidth + GAP)}px, ${Math.floor(index / columns) * (cardHeight + GAP)}px)`;
  card.entry.style.width = `${cardWidth}px`;
  card.entry.style.height = `${cardHeight}px`;
  card.entry.setAttribute("aria-setsize", matching);
  card.entry.setAttribute("aria-posinset", index + 1);
  card.link.tabIndex = index === current ? 0 : -1;
  card.entry.classList.toggle("current", index === current);
  if (!item) return;
  const href = `/item/${item.key}${query()}`;
  if (card.link.getAttribute("href") !== href) card.link.setAttribute("href", href);
  if (card.image.getAttribute("src") !== thumbnail(item)) card.image.src = thumbnail(item);
  const status = item.verdict ? LABELS[item.verdict] : item.awaits_second ? "awaiting a second reviewer" : "not reviewed";
  card.badge.className = `dot ${item.verdict ? `v-${item.verdict}` : item.awaits_second ? "awaits-second" : "none"}`;
  card.label.textContent = [item.position.toLocaleString("en"), item.class, item.flat ? "blank map" : ""].filter(Boolean).join(" · ");
  card.name.textContent = item.name ? shorten(item.name) : "";
  card.name.hidden = !item.name;
  card.name.title = item.name || "";
  const flags = item.flags.length ? `, flags: ${item.flags.join(", ")}` : "";
  card.link.setAttribute("aria-label", `Image ${item.position}${item.name ? `, ${item.name}` : ""}${item.class ? `, ${item.class}` : ""}${item.flat ? ", blank map" : ""}, ${status}${flags}`);
};

const draw = () => {
  const top = list.getBoundingClientRect().top;
  const firstRow = Math.max(0, Math.floor(-top / (cardHeight + GAP)) - 1);
  const lastRow = Math.ceil((innerHeight - top) / (cardHeight + GAP)) + 1;
  const from = firstRow * columns;
  const to = Math.min(matching, lastRow * columns);
  for (const [index, card] of cards) {
    if ((index < from || index >= to) && card.link !== document.activeElement) {
      card.entry.remove();
      cards.delete(index);
    }
  }
  for (let index = from; index < to; index += 1) {
    if (!cards.has(index)) cards.set(index, addCard(index));
    fillCard(cards.get(index), index);
  }
  for (let number = Math.floor(from / CHUNK); number * CHUNK < to; number += 1) load(number);
};

const rememberPlace = () => history.replaceState(null, "", `${location.pathname}${query()}#at=${current}`);

const select = (index, focus = true) => {
  if (!matching) return;
  const before = current;
  current = Math.max(0, Math.min(index, matching - 1));
  const top = list.getBoundingClientRect().top + Math.floor(current / columns) * (cardHeight + GAP);
  const header = document.querySelector(".bar").getBoundingClientRect().height + 8;
  if (top < header) scrollBy(0, top - header);
  else if (top + cardHeight > innerHeight) scrollBy(0, top + cardHeight - innerHeight + GAP);
  if (before !== current) rememberPlace();
  draw();
  if (focus) cards.get(current)?.link.focus({ preventScroll: true });
};

const selectUnreviewed = async () => {
  for (let index = current + 1; index < matching; index += 1) {
    if (!itemAt(index)) await load(Math.floor(index / CHUNK));
    if (!itemAt(index)?.verdict) return select(index);
  }
  announce("No image without your verdict after this one.");
};

const decide = async (verdict) => {
  const item = itemAt(current);
  if (!item) return;
  if (item.verdict) return announce("This image has your verdict; open it to change it.");
  try {
    const saved = await send(`/api/verdict${query()}`, { key: item.key, verdict, reason: "", previous_event: item.previous_event });
    Object.assign(item, saved.entry);
    announce(`Saved: ${LABELS[verdict]}.`);
    draw();
    refresh();
  } catch (error) {
    showError(error.message);
  }
};

const showProgress = (progress) => {
  $("reviewed").textContent = progress.reviewed.toLocaleString("en");
  $("meter").setAttribute("aria-valuenow", progress.reviewed);
  $("remainder").textContent = progress.remainder || "";
  $("remainder").hidden = !progress.remainder;
  for (const verdict of VERDICTS) {
    const count = progress.verdicts[verdict];
    document.querySelector(`[data-count="${verdict}"]`).textContent = count;
    document.querySelector(`#meter [data-verdict="${verdict}"]`).style.width = `${(100 * count) / Math.max(1, progress.total)}%`;
  }
};

const refresh = async () => {
  try {
    const progress = await getJson("/api/progress");
    showProgress(progress);
    if (version && progress.version !== version) restart();
  } catch (error) {
    showError(error.message);
  }
};

const restart = () => {
  chunks = new Map();
  loading = new Set();
  version = null;
  load(Math.floor(current / CHUNK));
  load(0);
};

const stepView = (by) => {
  view = ((view + 1 + by + views.length + 1) % (views.length + 1)) - 1;
  overlay = true;
  showOverlay();
  announce(view < 0 ? "All views together" : `View ${views[view]}`);
};

const showOverlay = () => {
  $("overlay").setAttribute("aria-pressed", overlay);
  $("view").textContent = view < 0 ? "all views" : `view ${views[view]}`;
  draw();
};

$("overlay").addEventListener("click", () => {
  overlay = !overlay;
  localStorage.setItem("equicam-overlay", overlay ? "on" : "off");
  showOverlay();
});
$("view-previous").addEventListener("click", () => stepView(-1));
$("view-next").addEventListener("click", () => stepView(1));
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("change", () => {
  current = 0;
  matching = 0;
  for (const card of cards.values()) card.entry.remove();
  cards = new Map();
  rememberPlace();
  restart();
});

let drawing = false;
addEventListener("scroll", () => {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}, { passive: true });
addEventListener("resize", () => {
  measure();
  draw();
});

document.addEventListener("keydown", (event) => {
  if (isTyping(event) || event.ctrlKey || event.metaKey || event.altKey) return;
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, j: 1, k: -1 };
  const number = Number(event.key);
  if (event.key in moves) select(current + moves[event.key]);
  else if (event.key === "Home") select(0);
  else if (event.key === "End") select(matching - 1);
  else if (number >= 1 && number <= VERDICTS.length) decide(VERDICTS[number - 1]);
  else if (event.key === "Enter" && (event.target === document.body || event.target.closest?.("#list"))) location.assign(cards.get(current)?.link.href || location.href);
  else if (event.key === "o") $("overlay").click();
  else if (event.key === "[" || event.key === "]") stepView(event.key === "[" ? -1 : 1);
  else if (event.key === "u") selectUnreviewed();
  else if (event.key === "f") document.querySelector("#filters select").focus();
  else return;
  event.preventDefault();
});

const start = async () => {
  const place = indexInHash(); // before the first load may write the hash
  showOverlay();
  await sendUnsent();
  await load(0);
  current = Math.min(place, Math.max(0, matching - 1));
  await load(Math.floor(current / CHUNK));
  select(current);
  refresh();
};
if ("scrollRestoration" in history) history.scrollRestoration = "manual";
setInterval(() => document.visibilityState === "visible" && refresh(), 10000);
start();
