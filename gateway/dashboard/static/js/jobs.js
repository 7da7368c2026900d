// The list of jobs: filtered and paged by the server, kept live by events.
import { get, withQuery } from "./api.js";
import { by, fill, h, reconcile, table } from "./dom.js";
import { ago, at, badge, carbon, count, duration, energy, figure, unknown, words } from "./format.js";
import { live, onJobs } from "./live.js";
import { me, trying } from "./shell.js";

const LIMIT = 50;
const FILTERS = ["q", "project", "user", "tenant"];
const form = by("filters");
const place = new URLSearchParams(location.search);
const before = []; // cursors of the pages before this one
let cursor = place.get("cursor");
let next = null;
let body = null;

for (const name of FILTERS) if (form.elements[name]) form.elements[name].value = place.get(name) ?? "";
const wanted = place.getAll("state").flatMap((each) => each.split(",")).filter(Boolean).sort().join();
const options = [...form.elements.state.options];
const option = options.find((each) => each.value.split(",").sort().join() === wanted);
if (option) form.elements.state.value = option.value;
else form.elements.state.append(h("option", { value: wanted, selected: true }, wanted.replaceAll(",", ", ")));

const query = () => ({
  state: form.elements.state.value.split(",").filter(Boolean),
  ...Object.fromEntries(FILTERS.map((name) => [name, form.elements[name]?.value.trim()])),
});

function size(job) {
  const { min, max, slice } = job.spec.gpus;
  if (job.gpus) return slice ? `1 × ${slice}` : count(job.gpus);
  return slice ? `1 × ${slice}` : max && max !== min ? `${min}–${max}` : `${min}`;
}

/** When it is expected to start, or since when, or how long it ran. */
function when(job) {
  if (job.ended_at) return job.started_at ? duration((new Date(job.ended_at) - new Date(job.started_at)) / 1000) : "never started";
  if (["running", "starting", "preempting"].includes(job.state)) return ["since ", at(job.started_at)];
  if (job.state === "held") return "when released";
  return job.expected_start_at ? ["expected ", at(job.expected_start_at)] : ["expected ", unknown()];
}

function why(job) {
  const known = job.ended_at || ["queued", "held"].includes(job.state);
  return h("td", { class: known ? "why" : "why blank" }, known ? job.detail ?? (words(job.reason) || "not looked at yet") : "–");
}

const used = (job, label, show) => h("td", { class: job.started_at ? "number" : "number blank", "data-label": label }, job.started_at ? show(job) : "–");

let [joules, grams] = [energy, carbon]; // in the unit of their columns
const row = (job) => h("tr", {},
  h("td", { class: "name" }, h("a", { href: `/jobs/${job.id}`, "data-focus": job.id }, job.name),
    h("small", {}, [me.isOperator ? job.tenant_id : null, job.project, job.user].filter(Boolean).join(" · "))),
  h("td", {}, badge(job.state, job.state === "queued" ? "waiting" : words(job.state))),
  why(job),
  h("td", { class: "time", "data-label": "" }, when(job)),
  h("td", { class: "number", "data-label": "GPUs" }, size(job)),
  h("td", { class: "time", "data-label": "submitted" }, at(job.submitted_at, ago)),
  used(job, "energy", (it) => figure(it.footprint.energy_j, joules)),
  used(job, "carbon", (it) => figure(it.footprint.carbon_gco2, grams)));

const COLUMNS = [["Name"], ["State"], ["Why it waits, or how it ended"], ["Start or length"], ["GPUs", "number"], ["Submitted"], ["Energy", "number"], ["Carbon", "number"]];

async function show() {
  const page = await get("/v1/jobs", { ...query(), limit: LIMIT, cursor });
  next = page.next_cursor;
  if (!page.items.length) {
    body = null;
    const filtered = Object.values(query()).some((each) => each?.length);
    fill(by("list"), h("p", { class: "card empty" }, filtered ? "No job matches the filter. " : "There are no jobs yet. ",
      !filtered && me.mayChange ? h("a", { href: "/jobs/new" }, "Submit the first") : null));
  } else {
    if (!body) {
      fill(by("list"), table("Jobs, newest first", COLUMNS, [], { class: "stack" }));
      body = by("list").querySelector("tbody");
    }
    [joules, grams] = [energy.of(page.items.map((job) => job.footprint.energy_j)), carbon.of(page.items.map((job) => job.footprint.carbon_gco2))];
    reconcile(body, page.items, { key: (job) => job.id, stamp: (job) => JSON.stringify([job.state, job.detail, job.gpus, job.expected_start_at, job.footprint.energy_j, joules(1), grams(1), ago(job.submitted_at)]), make: row });
  }
  by("older").disabled = !next;
  by("newer").disabled = !cursor;
  fill(by("where"), page.items.length ? [`${page.items.length} jobs, submitted `, at(page.items.at(-1).submitted_at), " to ", at(page.items[0].submitted_at)] : "");
  history.replaceState(null, "", withQuery("/jobs", { ...query(), cursor }));
}

const turn = (to) => { cursor = to; body = null; trying(show).then(() => scrollTo({ top: 0 })); };

form.addEventListener("submit", (event) => { event.preventDefault(); before.length = 0; turn(null); });
form.elements.state.addEventListener("change", () => form.requestSubmit());
by("older").addEventListener("click", () => { before.push(cursor); turn(next); });
by("newer").addEventListener("click", () => turn(before.pop() ?? null));

const refresh = live([], 1_500, () => trying(show));
onJobs((event) => {
  if (!cursor || body?.querySelector(`[data-key="${event.job_id}"]`)) refresh();
});
live(["footprints"], 15_000, refresh); // energy grows without events
