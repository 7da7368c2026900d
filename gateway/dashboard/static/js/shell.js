// What every page has: the switch of the theme, messages, dialogs that ask.
import { by, h } from "./dom.js";

const THEMES = { auto: "system", light: "light", dark: "dark" };
const button = by("theme");

function theme() {
  try { return localStorage.getItem("theme") ?? "auto"; } catch { return "auto"; }
}

function showTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  button.replaceChildren("◐", h("span", { class: "long" }, ` ${THEMES[name]}`));
  button.setAttribute("aria-label", `Theme: ${THEMES[name]}. Change it.`);
  document.dispatchEvent(new Event("themechange"));
}

if (button) {
  button.hidden = false;
  showTheme(theme());
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(theme()) + 1) % names.length];
    try { localStorage.setItem("theme", next); } catch { /* then it lasts as long as the page */ }
    showTheme(next);
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));

const { role, mayChange, tenant, zone } = document.body.dataset;
/** Who looks at the page. */
export const me = { role, tenant, zone, mayChange: mayChange === "true",
  isOperator: role === "operator" || role === "admin", isAdmin: role === "admin" };

/** Show a message above the page; one that is no error goes by itself. */
export function notice(text, kind = "problem") {
  const close = h("button", { type: "button", class: "quiet", "aria-label": "Close this message", onclick: () => shown.remove() }, "×");
  const shown = h("div", { class: `notice ${kind}` }, h("span", {}, text), close);
  const notices = by("notices");
  if ([...notices.children].some((each) => each.firstChild.textContent === text)) return;
  notices.append(shown);
  while (notices.children.length > 3) notices.firstElementChild.remove();
  if (kind !== "problem") setTimeout(() => shown.remove(), 6000);
}

/** Say what went wrong. */
export function tell(error) {
  if (error.name === "AbortError") return;
  const where = error.errors?.map((each) => `${each.pointer}: ${each.detail}`).join("; ");
  notice(where && !error.message.includes(where) ? `${error.message} ${where}` : error.message);
}

/** Do `work`; say what went wrong, and return null then. */
export async function trying(work) {
  try {
    return await work();
  } catch (error) {
    tell(error);
    return null;
  }
}

/** Ask before something is done that cannot be undone; return whether it was agreed to. */
export function confirmed(question, yes) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-label": question },
      h("form", { method: "dialog" }, h("p", {}, question),
        h("div", { class: "buttons" }, h("button", { value: "no" }, "No"), h("button", { value: "yes", class: "danger" }, yes))));
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue === "yes"); });
    document.body.append(dialog);
    dialog.showModal();
  });
}
