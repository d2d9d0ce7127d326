// One image: overlay, views, verdicts by key, notes.

import { announce, isTyping, send, sendUnsent, showError } from "./review.js";
import { openZoom } from "./zoom.js";

const $ = (id) => document.getElementById(id);
const item = $("item").dataset;
const buttons = [...document.querySelectorAll(".verdict")];
const tiles = [...document.querySelectorAll(".tile")];
let view = item.presentedView === "" ? 0 : Number(item.presentedView);
let pendingVerdict = null;
let sending = false;

const setOverlay = (on) => {
  document.body.classList.toggle("no-overlay", !on);
  $("overlay").setAttribute("aria-pressed", on);
  localStorage.setItem("equicam-overlay", on ? "on" : "off");
};
const setOpacity = (value) => {
  $("opacity").value = value;
  localStorage.setItem("equicam-opacity", $("opacity").value);
  for (const layer of document.querySelectorAll(".layer")) layer.style.opacity = $("opacity").value / 100;
};

// The colour bar lies over the mean grey of this image, so that it has the colours of the map over it.
const input = document.querySelector("#panel-input .input");
const setGrey = () => {
  const [canvas, side] = [document.createElement("canvas"), 32];
  canvas.width = canvas.height = side;
  const drawing = canvas.getContext("2d");
  drawing.imageSmoothingQuality = "high";
  drawing.drawImage(input, 0, 0, side, side);
  const data = drawing.getImageData(0, 0, side, side).data;
  const mean = [0, 1, 2].map((c) => data.filter((_, i) => i % 4 === c).reduce((sum, v) => sum + v / side ** 2, 0));
  $("grey").style.background = `rgb(${mean.map(Math.round).join(" ")})`;
};
if (input?.complete && input.naturalWidth) setGrey();
else input?.addEventListener("load", setGrey);

// The image is loaded when it is first wanted.
const setSurroundings = (on) => {
  if (!$("surroundings")) return;
  const image = $("surroundings-image");
  if (on && image && !image.hasAttribute("src")) image.src = image.dataset.src;
  $("panel-surroundings").hidden = !on;
  $("panels").classList.toggle("surrounded", on);
  $("surroundings").setAttribute("aria-pressed", on);
  localStorage.setItem("equicam-surroundings", on ? "on" : "off");
};

const showView = (number) => {
  if (!tiles.length) return;
  view = (number + tiles.length) % tiles.length;
  const tile = tiles[view];
  const presented = String(view) === item.presentedView;
  tiles.forEach((one, i) => one.setAttribute("aria-pressed", i === view));
  $("view-title").textContent = presented ? "Single view" : `View ${tile.dataset.label}`;
  $("view-caption").textContent = presented ? "as presented" : "aligned";
  $("layer-view").src = `/image/${item.key}/view-${view}`;
  $("layer-view").alt = `Aligned map of the view ${tile.dataset.label}.`;
  announce(tile.textContent.trim().replace(/\s+/g, " "));
};

// All tiles are cut from one image, so that 18 views cost one request.
const strip = $("strip");
if (strip) {
  const whole = new Image();
  whole.onload = () => {
    const width = whole.naturalWidth / tiles.length;
    tiles.forEach((tile, i) => {
      const image = tile.querySelector("img");
      image.src = strip.dataset.src;
      image.style.objectPosition = `${(100 * i) / Math.max(1, tiles.length - 1)}% 50%`;
      image.style.aspectRatio = `${width} / ${whole.naturalHeight}`;
    });
  };
  whole.src = strip.dataset.src;
}

// A message that the page shows after it has loaded again.
const announceAfterLoad = (message) => sessionStorage.setItem("equicam-message", message);

const decide = async (verdict) => {
  if (sending) return;
  const reason = $("reason").value.trim();
  const { label } = buttons.find((b) => b.dataset.verdict === verdict).dataset;
  if (item.verdict === verdict && !reason) return announce("That is your verdict already.");
  if (item.verdict && !reason) {
    pendingVerdict = verdict;
    $("reason").focus();
    $("reason-hint").textContent = `why it changes to “${label}”, then Enter`;
    return;
  }
  sending = true;
  try {
    const saved = await send(`/api/verdict${item.query}`, { key: item.key, verdict, reason, previous_event: Number(item.previousEvent) });
    announceAfterLoad(`Saved: ${label}.`);
    if ($("go-on").checked && saved.next_unreviewed) location.assign(`/item/${saved.next_unreviewed}${item.query}`);
    else location.reload();
  } catch (error) {
    showError(error.message);
    sending = false;
  }
};

const saveNote = async () => {
  const text = $("note").value.trim();
  if (!text || sending) return;
  sending = true;
  try {
    await send("/api/note", { key: item.key, text });
    $("note").value = "";
    announceAfterLoad("Note saved.");
    location.reload();
  } catch (error) {
    showError(error.message);
    sending = false;
  }
};

const follow = (id, none = "There is none.") => {
  const href = $(id).getAttribute("href");
  if (href) location.assign(href);
  else announce(none);
};
const ADJACENT = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "above", ArrowDown: "below" };

buttons.forEach((button) => button.addEventListener("click", () => decide(button.dataset.verdict)));
tiles.forEach((tile, i) => tile.addEventListener("click", () => showView(i)));
$("overlay").addEventListener("click", () => setOverlay(document.body.classList.contains("no-overlay")));
$("opacity").addEventListener("input", () => setOpacity($("opacity").value));
$("surroundings")?.addEventListener("click", () => setSurroundings($("panel-surroundings").hidden));
$("note-save").addEventListener("click", saveNote);
$("go-on").addEventListener("change", () => localStorage.setItem("equicam-go-on", $("go-on").checked ? "on" : "off"));
$("reason").addEventListener("keydown", (event) => {
  if (event.key === "Enter") {
    event.preventDefault();
    if (pendingVerdict && $("reason").value.trim()) decide(pendingVerdict);
    else $("title").focus();
  } else if (event.key === "Escape") {
    pendingVerdict = null;
    $("title").focus();
  }
});
$("note").addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("title").focus();
  else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) saveNote();
});

document.addEventListener("keydown", (event) => {
  if (isTyping(event) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.id === "opacity" && event.key.startsWith("Arrow")) return;
  const number = Number(event.key);
  if (number >= 1 && number <= buttons.length) decide(buttons[number - 1].dataset.verdict);
  else if (event.shiftKey && event.key in ADJACENT && $("surroundings")) follow(`adjacent-${ADJACENT[event.key]}`, "That window is not in the queue.");
  else if (event.key === "ArrowRight" || event.key === "j") follow("next");
  else if (event.key === "ArrowLeft" || event.key === "k") follow("previous");
  else if (event.key === "Enter" && !event.target.closest?.("a, button, summary")) follow("next-unreviewed");
  else if (event.key === "[" || event.key === "]") showView(view + (event.key === "[" ? -1 : 1));
  else if (event.key === "o") $("overlay").click();
  else if (event.key === "s" && $("surroundings")) $("surroundings").click();
  else if (event.key === "z" && $("zoom")) openZoom();
  else if (event.key === "+" || event.key === "=") setOpacity(Number($("opacity").value) + 10);
  else if (event.key === "-") setOpacity(Number($("opacity").value) - 10);
  else if (event.key === "r") $("reason").focus();
  else if (event.key === "n") $("note").focus();
  else if (event.key === "q" || event.key === "Escape") follow("back");
  else return;
  event.preventDefault();
});

setOverlay(localStorage.getItem("equicam-overlay") !== "off");
setOpacity(localStorage.getItem("equicam-opacity") || 75);
setSurroundings(localStorage.getItem("equicam-surroundings") === "on");
$("go-on").checked = localStorage.getItem("equicam-go-on") === "on";
const message = sessionStorage.getItem("equicam-message");
sessionStorage.removeItem("equicam-message");
$("title").focus({ preventScroll: true });
if (message) announce(message);
sendUnsent().then((sent) => sent && location.reload());
