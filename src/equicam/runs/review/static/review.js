// Shared by both pages: posts that survive a lost server, messages for screen readers, the dialog of keys.

const page = document.querySelector('meta[name="equicam"]').dataset;
const OUTBOX = "equicam-outbox";
const $ = (id) => document.getElementById(id);

export const announce = (message) => {
  const live = $("live");
  live.textContent = "";
  setTimeout(() => (live.textContent = message), 30); // a change of text is what screen readers announce
};

export const showError = (message) => {
  $("error").textContent = message || "";
  $("error").hidden = !message;
};

const newMark = () => {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
};

export const getJson = async (address) => {
  const response = await fetch(address, { headers: { accept: "application/json" } });
  const data = await response.json();
  if (!response.ok) throw new Error(data.error);
  return data;
};

const postJson = (url, body) =>
  fetch(url, {
    method: "POST",
    headers: { "content-type": "application/json", "x-equicam-csrf": page.csrf },
    body: JSON.stringify(body),
  });

const unsent = () => {
  try {
    return JSON.parse(localStorage.getItem(OUTBOX)) || [];
  } catch {
    return [];
  }
};
const store = (posts) => localStorage.setItem(OUTBOX, JSON.stringify(posts));
const remove = (post) => store(unsent().filter((one) => one.body.mark !== post.body.mark));

// A post stays in the browser until the server confirms it. Its mark makes a post that is sent twice count once.
const deliver = async (post) => {
  let response;
  try {
    response = await postJson(post.url, post.body);
  } catch {
    throw Object.assign(new Error("The server does not answer. Your verdict is kept in this browser and will be sent again."), { kept: true });
  }
  const data = await response.json().catch(() => ({}));
  if (response.ok) {
    remove(post);
    return data;
  }
  if ([401, 403].includes(response.status) || response.status >= 500) {
    const error = data.error || "The server could not store it.";
    throw Object.assign(new Error(`${error} Your verdict is kept in this browser and will be sent again.`), { kept: true });
  }
  remove(post);
  throw new Error(data.error || "The server refused it.");
};

export const send = async (url, body) => {
  const post = { url, body: { ...body, mark: newMark() }, run: page.run, reviewer: page.reviewer };
  store([...unsent(), post]);
  const data = await deliver(post);
  showError("");
  return data;
};

let sending = false;
export const sendUnsent = async () => {
  if (sending) return 0;
  sending = true;
  let sent = 0;
  try {
    for (const post of unsent()) {
      if (post.run !== page.run || post.reviewer !== page.reviewer) continue;
      try {
        await deliver(post);
        sent += 1;
      } catch (error) {
        showError(error.message);
        if (error.kept) break;
      }
    }
  } finally {
    sending = false;
  }
  if (sent) {
    showError("");
    announce(sent === 1 ? "One unsent verdict was sent." : `${sent} unsent verdicts were sent.`);
  }
  return sent;
};

export const isTyping = (event) => {
  const at = event.target;
  return at.matches?.("input:not([type=range]):not([type=checkbox]), textarea, select") || document.querySelector("dialog[open]") !== null;
};

$("help-open").addEventListener("click", () => $("help").showModal());
document.addEventListener("keydown", (event) => {
  if (event.key === "?" && !isTyping(event)) {
    event.preventDefault();
    $("help").showModal();
  }
});

// Light or dark: as the system, until it is chosen here.
const root = document.documentElement;
const nameTheme = () => ($("theme").firstChild.textContent = root.dataset.theme === "dark" ? "Light " : "Dark ");
const switchTheme = () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("equicam-theme", root.dataset.theme);
  nameTheme();
};
$("theme").addEventListener("click", switchTheme);
document.addEventListener("keydown", (event) => {
  if (event.key === "d" && !isTyping(event) && !event.ctrlKey && !event.metaKey && !event.altKey) switchTheme();
});
nameTheme();

$("reviewer-form")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const response = await postJson("/api/reviewer", { name: $("name").value });
  if (response.ok) location.assign("/");
  else showError((await response.json()).error);
});
