// Forms that the API checks: what it refuses is shown beside the field it is about.
import { h } from "./dom.js";
import { notice } from "./shell.js";

/** Take away what was said of the last attempt. */
export function clear(form) {
  for (const each of form.querySelectorAll(".field .error")) each.remove();
  for (const each of form.querySelectorAll("[aria-invalid]")) { each.removeAttribute("aria-invalid"); each.removeAttribute("aria-errormessage"); }
}

/** Say what is wrong beside the field. */
export function complain(input, text) {
  const id = `${input.id || input.name}-error`;
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-errormessage", id);
  input.closest(".field, td, form")?.append(h("p", { class: "error", id }, text));
}

/** Complain of what was typed and is no number or time, which the browser would pass on as nothing; return whether there was any. */
export function unreadable(form) {
  const found = [...form.elements].filter((each) => each.validity?.badInput);
  if (found.length) clear(form);
  for (const each of found) complain(each, each.type === "number" ? "must be a number" : "is no whole date and time");
  found[0]?.focus();
  return found.length > 0;
}

// Before any form's own listener, so that none goes on with half of what was typed.
document.addEventListener("submit", (event) => {
  if (!unreadable(event.target)) return;
  event.preventDefault();
  event.stopPropagation();
}, true);

/** Show an error of the API; `fieldOf` finds the input that a pointer such as `/gpus/min` is about. */
export function refused(form, error, fieldOf) {
  let first = null;
  const rest = [];
  for (const each of error.errors ?? []) {
    const input = fieldOf(each.pointer);
    if (input) { complain(input, each.detail); first ??= input; } else if (!error.message.includes(each.detail)) rest.push(`${each.pointer} ${each.detail}`);
  }
  first?.focus();
  if (!first || rest.length) notice(rest.length ? `${error.message} ${rest.join("; ")}` : error.message);
}

/** Do `work` while the button cannot be pressed again. */
export async function busy(button, work) {
  button.disabled = true;
  try { return await work(); } finally { button.disabled = false; }
}
