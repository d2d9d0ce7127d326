// Before the page is drawn: the colours chosen last, or those of the system.

const system = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => {
  const chosen = localStorage.getItem("equicam-theme");
  document.documentElement.dataset.theme = chosen === "dark" || chosen === "light" ? chosen : system.matches ? "dark" : "light";
};
applyTheme();
system.addEventListener("change", applyTheme);
