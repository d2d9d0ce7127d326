// One picture: overlay, angles, verdicts by key, notes.

import { announce, flush, send, trouble, typing } from "./review.js";

const $ = (id) => document.getElementById(id);
const desk = $("desk").dataset;
const buttons = [...document.querySelectorAll(".verdict")];
const tiles = [...document.querySelectorAll(".tile")];
let view = desk.upright === "" ? 0 : Number(desk.upright);
let pending = null;
let sending = false;

const overlay = (on) => {
  document.body.classList.toggle("bare", !on);
  $("overlay").setAttribute("aria-pressed", on);
  localStorage.setItem("equicam-overlay", on ? "on" : "off");
};
const opacity = (value) => {
  $("opacity").value = value;
  localStorage.setItem("equicam-opacity", $("opacity").value);
  for (const layer of document.querySelectorAll(".layer")) layer.style.opacity = $("opacity").value / 100;
};
const larger = (on) => {
  $("panels").classList.toggle("large", on);
  $("larger").setAttribute("aria-pressed", on);
  localStorage.setItem("equicam-larger", on ? "on" : "off");
};

const look = (number, say = true) => {
  if (!tiles.length) return;
  view = (number + tiles.length) % tiles.length;
  const tile = tiles[view];
  const upright = String(view) === desk.upright;
  tiles.forEach((one, i) => one.setAttribute("aria-pressed", i === view));
  $("view-title").textContent = upright ? "Single view" : `View at ${tile.dataset.degrees}`;
  $("view-said").textContent = upright ? "at 0°, as presented" : "turned back";
  $("layer-view").src = `/picture/${desk.key}/view-${view}`;
  $("layer-view").alt = `Map of the view at ${tile.dataset.degrees}, turned back.`;
  if (say) announce(tile.textContent.trim().replace(/\s+/g, " "));
};

const strip = $("strip");
if (strip) {
  const whole = new Image();
  whole.onload = () => {
    const wide = whole.naturalWidth / tiles.length;
    tiles.forEach((tile, i) => {
      const photo = tile.querySelector("img");
      photo.src = strip.dataset.src;
      photo.style.objectPosition = `${(100 * i) / Math.max(1, tiles.length - 1)}% 50%`;
      photo.style.aspectRatio = `${wide} / ${whole.naturalHeight}`;
    });
  };
  whole.src = strip.dataset.src;
}

const decide = async (verdict) => {
  if (sending) return;
  const reason = $("reason").value.trim();
  if (desk.verdict === verdict && !reason) return announce("That is your verdict already.");
  if (desk.verdict && !reason) {
    pending = verdict;
    $("reason").focus();
    $("reason-hint").textContent = `why it changes to “${buttons.find((b) => b.dataset.verdict === verdict).textContent.trim().replace(/\s+\d$/, "")}”, then Enter`;
    return;
  }
  sending = true;
  try {
    const told = await send(`/api/verdict${desk.query}`, { key: desk.key, verdict, reason, seen: Number(desk.seen) });
    const label = buttons.find((b) => b.dataset.verdict === verdict).querySelector("span").textContent;
    sessionStorage.setItem("equicam-said", `Saved: ${label}.`);
    if ($("go-on").checked && told.unread) location.assign(`/item/${told.unread}${desk.query}`);
    else location.reload();
  } catch (error) {
    trouble(error.message);
    sending = false;
  }
};

const note = async () => {
  const text = $("note").value.trim();
  if (!text || sending) return;
  sending = true;
  try {
    await send("/api/note", { key: desk.key, text });
    $("note").value = "";
    sessionStorage.setItem("equicam-said", "Note saved.");
    location.reload();
  } catch (error) {
    trouble(error.message);
    sending = false;
  }
};

const follow = (id) => {
  const href = $(id).getAttribute("href");
  if (href) location.assign(href);
  else announce("There is none.");
};

buttons.forEach((button) => button.addEventListener("click", () => decide(button.dataset.verdict)));
tiles.forEach((tile, i) => tile.addEventListener("click", () => look(i)));
$("overlay").addEventListener("click", () => overlay(document.body.classList.contains("bare")));
$("opacity").addEventListener("input", () => opacity($("opacity").value));
$("larger").addEventListener("click", () => larger(!$("panels").classList.contains("large")));
$("note-save").addEventListener("click", note);
$("go-on").addEventListener("change", () => localStorage.setItem("equicam-go-on", $("go-on").checked ? "on" : "off"));
$("reason").addEventListener("keydown", (event) => {
  if (event.key === "Enter") {
    event.preventDefault();
    if (pending && $("reason").value.trim()) decide(pending);
    else $("title").focus();
  } else if (event.key === "Escape") {
    pending = null;
    $("title").focus();
  }
});
$("note").addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("title").focus();
  else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) note();
});

document.addEventListener("keydown", (event) => {
  if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
  const slides = event.target.id === "opacity" && event.key.startsWith("Arrow");
  const number = Number(event.key);
  if (slides) return;
  if (number >= 1 && number <= buttons.length) decide(buttons[number - 1].dataset.verdict);
  else if (event.key === "ArrowRight" || event.key === "j") follow("next");
  else if (event.key === "ArrowLeft" || event.key === "k") follow("previous");
  else if (event.key === "Enter" && !event.target.closest?.("a, button, summary")) follow("unread");
  else if (event.key === "[" || event.key === "]") look(view + (event.key === "[" ? -1 : 1));
  else if (event.key === "o") $("overlay").click();
  else if (event.key === "z") $("larger").click();
  else if (event.key === "+" || event.key === "=") opacity(Number($("opacity").value) + 10);
  else if (event.key === "-") opacity(Number($("opacity").value) - 10);
  else if (event.key === "r") $("reason").focus();
  else if (event.key === "n") $("note").focus();
  else if (event.key === "q" || event.key === "Escape") follow("back");
  else return;
  event.preventDefault();
});

overlay(localStorage.getItem("equicam-overlay") !== "off");
opacity(localStorage.getItem("equicam-opacity") || 75);
larger(localStorage.getItem("equicam-larger") === "on");
$("go-on").checked = localStorage.getItem("equicam-go-on") === "on";
const said = sessionStorage.getItem("equicam-said");
sessionStorage.removeItem("equicam-said");
$("title").focus({ preventScroll: true });
if (said) announce(said);
flush().then((sent) => sent && location.reload());
