// Before anything is painted: the theme that was chosen here, else that of the system.
(() => {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* storage is off: the system's theme it is */ }
})();
