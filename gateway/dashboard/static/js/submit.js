// The form that submits a job, and says before what would become of it.
import { send } from "./api.js";
import { by, facts, fill, h } from "./dom.js";
import { at, carbon, count, counted, duration, intensity, power, startsNow, unknown } from "./format.js";
import { busy, clear, complain, refused, unreadable } from "./forms.js";
import "./shell.js";

const form = by("submit");
const FIELDS = { "/name": "name", "/project": "project", "/command": "command", "/image": "image", "/working_dir": "working_dir",
  "/gpus/min": "gpus_min", "/gpus/max": "gpus_max", "/gpus": "gpus_min", "/gpus/model": "model", "/time_limit_s": "hours",
  "/deadline": "deadline", "/flexibility_s": "flexibility", "/priority": "priority", "/hold": "hold", "": "command" };
const fieldOf = (pointer) => form.elements[FIELDS[pointer]] ?? null;
/** What only a shell understands; without it, the words are the arguments, and launchers are known as such. */
const SHELL = /["'`$\\|&;<>(){}[\]*?~#!\n]/;
/** One key for what is in the form: pressing twice, or again after a lost answer, submits once. */
let attempt = null;

/** Return the job that the form describes; null if what was typed is none. */
function spec() {
  clear(form);
  if (unreadable(form)) return null;
  const value = (name) => form.elements[name].value.trim();
  const number = (name) => (value(name) === "" ? undefined : Number(value(name)));
  const line = value("command");
  const found = {
    name: value("name"),
    project: value("project") || undefined,
    command: !line ? undefined : SHELL.test(line) ? ["sh", "-c", line] : line.split(/\s+/),
    image: value("image") || undefined,
    working_dir: value("working_dir") || undefined,
    gpus: { min: number("gpus_min") ?? 1, max: number("gpus_max"), model: value("model") || undefined },
    time_limit_s: number("hours") === undefined ? undefined : number("hours") * 3600,
    deadline: value("deadline") ? new Date(value("deadline")).toISOString() : undefined,
    flexibility_s: number("flexibility") === undefined ? undefined : number("flexibility") * 3600,
    processes: value("processes") || undefined,
    priority: number("priority") ?? 0,
    preemptible: form.elements.preemptible.checked,
    hold: form.elements.hold.checked,
  };
  if (!value("more")) return found;
  try {
    return { ...found, ...JSON.parse(value("more")) };
  } catch (error) {
    form.querySelector("details").open = true;
    complain(form.elements.more, `This is not JSON: ${error.message}`);
    form.elements.more.focus();
    return null;
  }
}

function emission(estimate) {
  if (!estimate) return unknown();
  const grams = estimate.carbon_gco2 ?? estimate.carbon_gco2_per_hour;
  return [grams === null ? unknown() : `${carbon(grams)}${estimate.carbon_gco2 === null ? " an hour" : ""}`, h("span", { class: "sub" }, `${intensity(estimate.intensity_gco2_per_kwh)} at `, at(estimate.starts_at))];
}

async function estimate() {
  const asked = spec();
  if (!asked) return;
  try {
    const found = await send("POST", "/v1/jobs:estimate", asked);
    by("estimated").hidden = false;
    fill(by("estimated"), h("h2", {}, found.starts_now ? `It would start now, on ${counted(found.gpus, "GPU")}` : "It would wait"), found.detail ? h("p", {}, found.detail) : null, facts([
      found.starts_now ? null : ["Expected start", found.expected_start_at ? at(found.expected_start_at) : unknown()],
      ["Free GPUs that suit", `${count(found.free_gpus)} of ${count(found.suitable_gpus)}`],
      ["Runs for", found.duration_s === null ? unknown() : duration(found.duration_s)],
      ["Draws", found.power_w === null ? unknown() : power(found.power_w)],
      ["Would emit, begun now", emission(found.now)],
      ["At the greenest time", startsNow(found) ? "it is now" : emission(found.greenest)],
    ]), h("p", { class: "note" }, `Under the policy ${found.policy}. ${found.assumptions.join(" ")}`));
    by("estimated").scrollIntoView({ block: "nearest" });
  } catch (error) {
    refused(form, error, fieldOf);
  }
}

async function submit() {
  const asked = spec();
  if (!asked) return;
  attempt ??= crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  try {
    const made = await send("POST", "/v1/jobs", asked, { "idempotency-key": attempt });
    location.assign(made.count ? `/jobs?q=${encodeURIComponent(made.name)}` : `/jobs/${made.id}`);
  } catch (error) {
    refused(form, error, fieldOf);
  }
}

form?.addEventListener("input", () => { attempt = null; });
form?.addEventListener("submit", (event) => { event.preventDefault(); busy(event.submitter ?? form.querySelector(".primary"), submit); });
by("estimate")?.addEventListener("click", (event) => busy(event.target, estimate));
