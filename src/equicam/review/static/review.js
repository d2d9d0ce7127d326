// What both pages share: posts that survive a lost server, words for screen readers, the dialog of keys.

const page = document.querySelector('meta[name="equicam"]').dataset;
const BOX = "equicam-outbox";
const $ = (id) => document.getElementById(id);

export const announce = (words) => {
  const live = $("live");
  live.textContent = "";
  setTimeout(() => (live.textContent = words), 30);
};

export const trouble = (words) => {
  $("trouble").textContent = words || "";
  $("trouble").hidden = !words;
};

export const mark = () => {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
};

export const ask = async (address) => {
  const answer = await fetch(address, { headers: { accept: "application/json" } });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  return told;
};

const waiting = () => {
  try {
    return JSON.parse(localStorage.getItem(BOX)) || [];
  } catch {
    return [];
  }
};
const keep = (letters) => localStorage.setItem(BOX, JSON.stringify(letters));
const drop = (letter) => keep(waiting().filter((one) => one.body.mark !== letter.body.mark));

// A letter lies in the browser until the server has it; sent twice it counts once, by its mark.
const deliver = async (letter) => {
  let answer;
  try {
    answer = await fetch(letter.url, {
      method: "POST",
      headers: { "content-type": "application/json", "x-equicam-csrf": page.csrf },
      body: JSON.stringify(letter.body),
    });
  } catch {
    throw Object.assign(new Error("The server does not answer. Your verdict is kept in this browser and sent again."), { kept: true });
  }
  const told = await answer.json().catch(() => ({}));
  if (answer.ok) {
    drop(letter);
    return told;
  }
  if ([401, 403].includes(answer.status) || answer.status >= 500) {
    const why = told.error || "The server could not keep it.";
    throw Object.assign(new Error(`${why} Your verdict is kept in this browser and sent again.`), { kept: true });
  }
  drop(letter);
  throw new Error(told.error || "The server refused it.");
};

export const send = async (url, body) => {
  const letter = { url, body: { ...body, mark: mark() }, run: page.run, reviewer: page.reviewer };
  keep([...waiting(), letter]);
  const told = await deliver(letter);
  trouble("");
  return told;
};

let busy = false;
export const flush = async () => {
  if (busy) return 0;
  busy = true;
  let sent = 0;
  try {
    for (const letter of waiting()) {
      if (letter.run !== page.run || letter.reviewer !== page.reviewer) continue;
      try {
        await deliver(letter);
        sent += 1;
      } catch (error) {
        trouble(error.message);
        if (error.kept) break;
      }
    }
  } finally {
    busy = false;
  }
  if (sent) {
    trouble("");
    announce(`${sent} kept verdicts were sent.`);
  }
  return sent;
};

export const typing = (event) => {
  const at = event.target;
  return at.matches?.("input:not([type=range]):not([type=checkbox]), textarea, select") || $("help").open;
};

$("help-open").addEventListener("click", () => $("help").showModal());
document.addEventListener("keydown", (event) => {
  if (event.key === "?" && !typing(event)) {
    event.preventDefault();
    $("help").showModal();
  }
});

$("who")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await fetch("/api/reviewer", {
    method: "POST",
    headers: { "content-type": "application/json", "x-equicam-csrf": page.csrf },
    body: JSON.stringify({ name: $("name").value }),
  });
  if (answer.ok) location.assign("/");
  else trouble((await answer.json()).error);
});
