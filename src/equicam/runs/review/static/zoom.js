// The original pixels of what the model saw, in a dialog: wheel, keys and buttons zoom, dragging moves.

const $ = (id) => document.getElementById(id);
const dialog = $("zoom");
const MAX_SCALE = 32;
let scale = 1;
let fit = 1;

const setScale = (wanted, at) => {
  const [view, image] = [$("zoom-view"), $("zoom-image")];
  const focus = at || [view.clientWidth / 2, view.clientHeight / 2];
  const before = scale;
  scale = Math.min(MAX_SCALE, Math.max(Math.min(fit, 1), wanted));
  $("zoom-stack").style.width = `${image.naturalWidth * scale}px`;
  $("zoom-stack").classList.toggle("pixels", scale >= 2);
  $("zoom-scale").textContent = `${Math.round(100 * scale)} %`;
  view.scrollLeft = ((view.scrollLeft + focus[0]) * scale) / before - focus[0];
  view.scrollTop = ((view.scrollTop + focus[1]) * scale) / before - focus[1];
};

const fitImage = () => {
  const [view, image] = [$("zoom-view"), $("zoom-image")];
  fit = Math.min(view.clientWidth / image.naturalWidth, view.clientHeight / image.naturalHeight);
  $("zoom-size").textContent = `${image.naturalWidth.toLocaleString("en")} × ${image.naturalHeight.toLocaleString("en")}`;
  setScale(fit);
};

const setLayer = (on) => {
  if (!$("zoom-layer")) return;
  $("zoom-layer").hidden = !on;
  $("zoom-overlay").setAttribute("aria-pressed", on);
};

// `panel` is the one that was clicked: its map lies over the original, if it has one.
export const openZoom = (panel) => {
  const image = $("zoom-image");
  const layer = panel?.querySelector(".layer");
  if ($("zoom-layer")) {
    $("zoom-layer").src = (layer || $("layer-map")).src;
    $("zoom-layer").style.opacity = $("opacity").value / 100;
  }
  setLayer(Boolean(layer) && !document.body.classList.contains("no-overlay"));
  dialog.showModal();
  if (image.hasAttribute("src")) fitImage();
  else {
    image.addEventListener("load", fitImage);
    image.src = image.dataset.src;
  }
  $("zoom-view").focus();
};

if (dialog) {
  for (const panel of document.querySelectorAll(".panel:not(#panel-surroundings)")) {
    panel.querySelector(".stack").addEventListener("click", () => openZoom(panel));
  }
  $("zoom-open").addEventListener("click", () => openZoom());
  $("zoom-close").addEventListener("click", () => dialog.close());
  $("zoom-in").addEventListener("click", () => setScale(scale * 1.5));
  $("zoom-out").addEventListener("click", () => setScale(scale / 1.5));
  $("zoom-overlay")?.addEventListener("click", () => setLayer($("zoom-layer").hidden));
  $("zoom-view").addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = $("zoom-view").getBoundingClientRect();
    setScale(scale * (event.deltaY < 0 ? 1.25 : 0.8), [event.clientX - box.left, event.clientY - box.top]);
  }, { passive: false });
  $("zoom-view").addEventListener("pointermove", (event) => {
    if (event.buttons !== 1 || event.pointerType === "touch") return;
    $("zoom-view").scrollBy(-event.movementX, -event.movementY);
  });
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "z") dialog.close();
    else if (event.key === "o") setLayer($("zoom-layer")?.hidden);
    else if (event.key === "+" || event.key === "=") setScale(scale * 1.5);
    else if (event.key === "-") setScale(scale / 1.5);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}
