// Policies: what each is, its parameters, which is in force, and what others would do.
import { get, send } from "./api.js";
import { by, facts, fill, h } from "./dom.js";
import { at, duration } from "./format.js";
import { busy, clear, refused } from "./forms.js";
import { live, persistently } from "./live.js";
import { confirmed, me, notice, trying } from "./shell.js";
import { TradeOff } from "./tradeoff.js";
import { WhatIf } from "./whatif.js";

const PREFIXES = [["", "no"], ["fair+", "yes, by weight"]];
const FIRST = 5; // parameters that are shown at once: policies list the most important ones first
let active = null;
let list = [];
let chosen = null; // of the list
const whatIf = new WhatIf();
const tradeOff = new TradeOff((changed) => { active = changed; showActive(); choose(plainName(active.name)); });

const plainName = (name) => name.replace(/^fair\+/, "");
const text = (value) => (value === null || value === undefined ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

function showActive() {
  const plain = list.find((each) => each.name === active.name) ?? list.find((each) => each.name === plainName(active.name));
  const changed = (plain?.parameters ?? []).filter((each) => text(active.parameters[each.name]) !== text(each.default) && each.name in active.parameters);
  fill(by("active"), facts([
    ["Policy", h("span", { class: "big", id: "active-name" }, active.name)],
    ["Since", at(active.since), h("span", { class: "sub" }, `by ${active.changed_by}`)],
    ["An active round every", duration(active.round_interval_s)],
    ["Parameters that differ from their defaults", changed.length ? changed.map((each) => h("span", { class: "sub" }, `${each.name} = ${text(active.parameters[each.name])}${each.unit ? ` ${each.unit}` : ""}`)) : "none"],
  ]), plain ? h("p", { class: "note" }, plain.summary) : null, active.problem ? h("p", { class: "problem" }, active.problem) : null);
  if (text(tradeOff.active) !== text(active)) tradeOff.show(active);
}

function showList() {
  fill(by("list"), h("ul", { class: "choose" }, list.map((each) => h("li", {}, h("button", { type: "button", class: "quiet", "aria-pressed": String(each.name === chosen?.name), onclick: () => choose(each.name) },
    h("strong", {}, each.name, each.name === plainName(active.name) ? h("span", { class: "badge good" }, "in force") : null), h("span", { class: "sub" }, each.summary))))));
}

/** Return the input of a parameter, empty for its default. */
function inputOf(parameter) {
  const id = `parameter-${parameter.name}`;
  const now = plainName(active.name) === chosen.name ? active.parameters[parameter.name] : undefined;
  const differs = now !== undefined && text(now) !== text(parameter.default);
  const common = { id, name: parameter.name, "aria-describedby": `${id}-hint`, disabled: !me.isOperator };
  const choices = parameter.choices ?? (parameter.type === "boolean" ? ["true", "false"] : null);
  if (choices) {
    return h("select", common, h("option", { value: "" }, `default: ${text(parameter.default)}`),
      choices.map((each) => h("option", { value: each, selected: differs && text(now) === each }, each)));
  }
  return h("input", { ...common, inputmode: parameter.type === "text" ? null : "decimal", placeholder: `default: ${text(parameter.default)}`, value: differs ? text(now) : "" });
}

/** Return what was typed as a value of the parameter's type; null for its default. */
function valueOf(parameter, typed) {
  if (typed === "") return undefined;
  if (typed === "none") return null;
  if (parameter.type === "boolean") return typed === "true";
  if (parameter.choices && !["number", "integer"].includes(parameter.type)) return typed;
  if (/^[[{]/.test(typed)) { try { return JSON.parse(typed); } catch { return typed; } }
  return Number.isNaN(Number(typed)) ? typed : Number(typed);
}

const bounds = ({ minimum, maximum, unit }) => [
  minimum !== null && maximum !== null ? `${minimum} to ${maximum}` : minimum !== null ? `at least ${minimum}` : maximum !== null ? `at most ${maximum}` : "", unit ?? ""].filter(Boolean).join(" ");

function choose(name) {
  chosen = list.find((each) => each.name === name);
  showList();
  const fair = active.name === `fair+${name}`;
  const field = (each) => h("div", { class: "field" }, h("label", { for: `parameter-${each.name}` }, each.name), inputOf(each),
    h("p", { class: "hint", id: `parameter-${each.name}-hint` }, each.meaning, bounds(each) ? ` (${bounds(each)})` : ""));
  const differs = (each) => plainName(active.name) === chosen.name && text(active.parameters[each.name] ?? each.default) !== text(each.default);
  const first = chosen.parameters.filter((each, i) => i < FIRST || differs(each));
  const rest = chosen.parameters.filter((each) => !first.includes(each));
  const form = h("form", { novalidate: true },
    h("p", {}, chosen.summary), chosen.source ? h("p", { class: "note" }, `Source: ${chosen.source}`) : null,
    h("div", { class: "fields" },
      h("div", { class: "field" }, h("label", { for: "fair" }, "Share between tenants"), h("select", { id: "fair", name: "fair", disabled: !me.isOperator }, PREFIXES.map(([prefix, word]) => h("option", { value: prefix, selected: fair === (prefix !== "") }, word)))),
      first.map(field)),
    rest.length ? h("details", {}, h("summary", {}, `${rest.length} more parameters`), h("div", { class: "fields" }, rest.map(field))) : null,
    me.isOperator ? h("div", { class: "buttons form-buttons" }, h("button", { class: "primary", id: "switch" }, plainName(active.name) === name ? "Change its parameters" : `Put ${name} in force`)) : h("p", { class: "note" }, "Operators may change it."));
  form.addEventListener("submit", (event) => { event.preventDefault(); busy(event.submitter, () => change(form)); });
  fill(by("chosen"), form);
  by("chosen-title").textContent = chosen.name;
}

async function change(form) {
  clear(form);
  const parameters = {};
  for (const each of chosen.parameters) {
    const value = valueOf(each, form.elements[each.name].value.trim());
    if (value !== undefined) parameters[each.name] = value;
  }
  const name = `${form.elements.fair.value}${chosen.name}`;
  if (name !== active.name && !(await confirmed(`Put ${name} in force in place of ${active.name}? A round follows at once, and running jobs may move.`, "Put in force"))) return;
  try {
    active = await send("PUT", "/v1/policies/active", { name, parameters });
  } catch (error) {
    for (const each of form.querySelectorAll("details")) each.open = true; // what is refused may be within
    return refused(form, error, (pointer) => form.elements[pointer.split("/").at(-1)]);
  }
  notice(`${name} is in force.`, "good");
  showActive();
  choose(chosen.name);
}

async function read() {
  active = await get("/v1/policies/active");
  showActive();
}

persistently(async () => {
  [active, { items: list }] = await Promise.all([get("/v1/policies/active"), get("/v1/policies")]);
  list.sort((a, b) => Number(b.name === plainName(active.name)) - Number(a.name === plainName(active.name)) || a.name.localeCompare(b.name));
  showActive();
  choose(plainName(active.name));
  whatIf.offer(list, plainName(active.name));
  live(["policies"], 2_000, read);
});
