// Elements from data. Text is always text: nothing here parses HTML.

/** Return an element; `properties` are attributes, `on…` listeners, `dataset`, and `null` leaves one out. */
export function h(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "value" && "value" in element && tag !== "data" && tag !== "li") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else element.append(child);
  }
}

/** Return the element with this id. */
export const by = (id) => document.getElementById(id);

/** Replace what is in `element`, and take its sign of loading away. */
export function fill(element, ...children) {
  element.classList.remove("loading");
  element.replaceChildren();
  add(element, children);
  return element;
}

/** Show `keys` as rows made by `make`, keeping those whose `stamp` has not changed, and the focus with them. */
export function reconcile(body, items, { key, stamp, make }) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let place = body.firstElementChild;
  for (const item of items) {
    const id = key(item);
    const mark = stamp(item);
    let row = old.get(id);
    if (!row || row.dataset.stamp !== mark) {
      const made = make(item);
      made.dataset.key = id;
      made.dataset.stamp = mark;
      if (row) {
        const focused = row.contains(document.activeElement) ? document.activeElement.getAttribute("data-focus") : null;
        if (place === row) place = made;
        row.replaceWith(made);
        if (focused) made.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
      }
      row = made;
    }
    old.delete(id);
    if (place === row) place = row.nextElementSibling;
    else body.insertBefore(row, place);
  }
  for (const row of old.values()) row.remove();
}

/** Return a table in a region that scrolls; `columns` are `[title, class]`. On a phone, class `rows` makes each row a list. */
export function table(caption, columns, rows, properties = {}) {
  if (properties.class === "rows") for (const row of rows) [...row.cells].forEach((cell, i) => { if (i && cell.colSpan === 1) cell.dataset.label = columns[i][0]; });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", properties,
      h("caption", { class: "sr-only" }, caption),
      h("thead", {}, h("tr", {}, columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title || h("span", { class: "sr-only" }, "Actions"))))),
      h("tbody", {}, rows)));
}

/** Return terms and what they are, as a list; what is null is left out. */
export const facts = (pairs) => h("dl", { class: "facts" },
  pairs.filter(Boolean).map(([term, ...text]) => h("div", {}, h("dt", {}, term), h("dd", {}, text))));
