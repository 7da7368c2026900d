// Jobs: grouped by state with arrays folded, or, once a state or an array is chosen, one list paged by the server.
import { get, send, withQuery } from "./api.js";
import { by, fill, h, reconcile, table } from "./dom.js";
import { ago, at, badge, carbon, count, counted, duration, energy, figure, numberOf, words } from "./format.js";
import { live, onJobs } from "./live.js";
import { RUNNING, endOf, progressOf, shareOf } from "./progress.js";
import { confirmed, me, notice, trying } from "./shell.js";

const LIMIT = 50;
const FEW = matchMedia("(max-width: 560px)").matches ? 7 : 15;
const AT_ONCE = 8;
const FILTERS = ["q", "project", "user", "tenant"];
const GROUPS = [["Running", RUNNING], ["Waiting", ["queued"]], ["Held", ["held"]], ["Ended", ["succeeded", "failed", "cancelled"]]];
const SAVED = "job-filters";
const form = by("filters");
const place = new URLSearchParams(location.search);
const array = place.get("array");
const before = []; // cursors of the pages before this one
const chosen = new Map(); // the jobs and arrays that are ticked, by id
const shown = new Map(); // what the page shows, by id
let cursor = place.get("cursor");
let next = null;
let groups = null; // of the grouped list: `{states, section, most}`
let list = null; // of the plain list
let order = null; // `{column, down}`

for (const name of FILTERS) if (form.elements[name]) form.elements[name].value = place.get(name) ?? "";
chooseState(place.getAll("state").flatMap((each) => each.split(",")).filter(Boolean));

function chooseState(states) {
  const wanted = [...states].sort().join();
  const known = [...form.elements.state.options].find((each) => each.value.split(",").sort().join() === wanted);
  if (known) form.elements.state.value = known.value;
  else form.elements.state.append(h("option", { value: wanted, selected: true }, wanted.replaceAll(",", ", ")));
}

const states = () => form.elements.state.value.split(",").filter(Boolean);
const filters = () => Object.fromEntries(FILTERS.map((name) => [name, form.elements[name]?.value.trim()]));
const isGrouped = () => !array && !states().length;
const isArray = (job) => job.tasks !== undefined;
const pathOf = (job) => `/v1/${isArray(job) ? "arrays" : "jobs"}/${job.id}`;

function size(job) {
  const { min, max, slice } = job.spec.gpus;
  if (job.gpus) return slice ? `1 × ${slice}` : count(job.gpus);
  return slice ? `1 × ${slice}` : max && max !== min ? `${min}–${max}` : `${min}`;
}

/** When it is expected to start or to end, or how long it ran. */
function when(job) {
  if (job.ended_at) return job.started_at ? duration((new Date(job.ended_at) - new Date(job.started_at)) / 1000) : "never started";
  if (RUNNING.includes(job.state)) return isArray(job) ? ["since ", at(job.started_at)] : ["ends ", endOf(job)];
  if (job.state === "held") return "when released";
  return job.expected_start_at ? ["starts ", at(job.expected_start_at)] : h("span", { title: "When it starts is not known." }, "–");
}

const done = ({ tasks }) => tasks.succeeded + tasks.failed + tasks.cancelled;
const tasksOf = (job) => Object.entries(job.tasks).filter(([, n]) => n).map(([state, n]) => `${count(n)} ${state === "queued" ? "waiting" : state}`).join(", ");

/** How far a running job is, why one waits, or how it ended. */
function how(job) {
  if (isArray(job)) return [progressOf({ progress: { done: done(job), total: job.count } }), h("small", {}, tasksOf(job))];
  if (RUNNING.includes(job.state)) return progressOf(job);
  const short = words(job.reason) || "not looked at yet";
  return job.ended_at && job.state !== "succeeded" ? job.detail ?? short : h("span", { title: job.detail }, short);
}

const used = (job, label, show) => h("td", { class: job.started_at ? "number" : "number blank", "data-label": label }, job.started_at ? show(job) : "–");

let [joules, grams] = [energy, carbon]; // in the unit of their columns
const row = (job) => h("tr", {},
  me.mayChange ? h("td", { class: "tick" }, h("input", { type: "checkbox", "aria-label": `Choose ${job.name}`, checked: chosen.has(job.id), "data-focus": `tick-${job.id}`,
    onchange: ({ target }) => { if (target.checked) chosen.set(job.id, job); else chosen.delete(job.id); showChosen(); } })) : null,
  h("td", { class: "name" }, h("a", { href: isArray(job) ? `/jobs?array=${job.id}` : `/jobs/${job.id}`, "data-focus": job.id }, job.name, isArray(job) ? ` [${job.first}–${job.last}]` : ""),
    h("small", {}, [numberOf(job), me.isOperator ? job.tenant_id : null, job.project, job.user].filter(Boolean).join(" · "))),
  h("td", { class: "state" }, badge(job.state, job.state === "queued" ? "waiting" : words(job.state))),
  h("td", { class: "why" }, how(job)),
  h("td", { class: "time", "data-label": "" }, when(job)),
  h("td", { class: "number", "data-label": "GPUs" }, size(job)),
  h("td", { class: "time", "data-label": "submitted" }, at(job.submitted_at, ago)),
  used(job, "energy", (it) => figure(it.footprint.energy_j, joules)),
  used(job, "carbon", (it) => figure(it.footprint.carbon_gco2, grams)));

const stamp = (job) => JSON.stringify([job.state, job.detail, job.gpus, job.expected_start_at, job.progress?.done, job.tasks, job.footprint.energy_j, joules(1), grams(1), ago(job.submitted_at)]);

/** Columns, with what each is sorted by. */
const COLUMNS = [["Name", "", (job) => job.name], ["State", "", null], ["Progress, or why", "", (job) => (isArray(job) ? done(job) / job.count : shareOf(job))], ["Start, end or length", "", null],
  ["GPUs", "number", (job) => job.gpus || job.spec.gpus.min], ["Submitted", "", (job) => job.submitted_at], ["Energy", "number", (job) => job.footprint.energy_j], ["Carbon", "number", (job) => job.footprint.carbon_gco2]];

function sorted(items) {
  if (!order) return items;
  const [, , of] = COLUMNS[order.column];
  const key = (job) => of(job) ?? -Infinity;
  return items.toSorted((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (order.down ? -1 : 1));
}

function heading([title, , of], column) {
  if (!of) return title;
  const sign = order?.column === column ? (order.down ? " ▾" : " ▴") : "";
  return h("button", { type: "button", class: "quiet sort", "data-focus": `sort-${title}`, title: "Sort those shown", onclick: () => {
    order = order?.column === column ? (order.down ? { column, down: false } : null) : { column, down: true };
    redraw();
    [...document.querySelectorAll(`[data-focus="sort-${title}"]`)].at(0)?.focus();
  } }, title, sign);
}

/** Return a table without rows; its first column ticks all of them. */
function emptyTable(caption) {
  const tick = me.mayChange ? [[h("input", { type: "checkbox", "aria-label": `Choose all: ${caption}`, onchange: ({ target }) => {
    for (const input of target.closest("table").querySelectorAll("tbody .tick input")) if (input.checked !== target.checked) input.click();
  } }), "tick"]] : [];
  return table(caption, [...tick, ...COLUMNS.map((each, i) => [heading(each, i), each[1]])], [], { class: "stack jobs" });
}

function draw(holder, items) {
  for (const job of items) shown.set(job.id, job);
  [joules, grams] = [energy.of(items.map((job) => job.footprint.energy_j)), carbon.of(items.map((job) => job.footprint.carbon_gco2))];
  reconcile(holder.querySelector("tbody"), sorted(items), { key: (job) => job.id, stamp, make: row });
}

function redraw() {
  groups = list = null;
  return trying(show);
}

const newest = (a, b) => b.submitted_at.localeCompare(a.submitted_at);

/** Read at most `most` jobs in some states, arrays folded where the filters allow that, and whether there are more. */
async function readGroup(wanted, most) {
  const asked = { ...filters(), state: wanted, limit: most };
  const folds = !asked.q; // arrays are not searched by a part of their name
  const [jobs, arrays] = await Promise.all([get("/v1/jobs", { ...asked, tasks: folds ? false : null }), folds ? get("/v1/arrays", asked) : { items: [] }]);
  const items = [...jobs.items, ...arrays.items.filter((each) => wanted.includes(each.state))].sort(newest);
  return { items: items.slice(0, most), more: items.length > most || jobs.next_cursor !== null || Boolean(arrays.next_cursor) };
}

async function showGroups() {
  const most = groups?.map((each) => each.most) ?? GROUPS.map(() => FEW);
  const found = await Promise.all(GROUPS.map(([, wanted], i) => readGroup(wanted, most[i])));
  if (!found.some(({ items }) => items.length)) {
    groups = null;
    return showNothing(Object.values(filters()).some(Boolean));
  }
  if (!groups) {
    groups = GROUPS.map(([title, wanted], i) => {
      const more = h("button", { type: "button", class: "quiet", onclick: () => { groups[i].most = groups[i].most < LIMIT ? LIMIT : groups[i].most; trying(show); } });
      const all = h("a", { class: "small", href: withQuery("/jobs", { ...filters(), state: wanted.join() }) }, "all, page by page");
      return { most: most[i], more, all, section: h("section", { class: "group" }, h("h2", {}, title), emptyTable(title), h("p", { class: "pager" }, more, all)) };
    });
    fill(by("list"), groups.map((each) => each.section));
  }
  groups.forEach((group, i) => {
    group.section.hidden = !found[i].items.length;
    draw(group.section, found[i].items);
    group.more.hidden = !found[i].more || group.most >= LIMIT;
    group.more.textContent = `Show ${LIMIT}`;
    group.all.hidden = !found[i].more;
  });
}

function showNothing(isFiltered) {
  fill(by("list"), h("p", { class: "card empty" }, isFiltered ? "No job matches the filter. " : "There are no jobs yet. ",
    !isFiltered && me.mayChange ? h("a", { href: "/jobs/new" }, "Submit the first") : null));
}

async function showList() {
  const page = await get("/v1/jobs", { ...filters(), state: states(), array, limit: LIMIT, cursor });
  next = page.next_cursor;
  if (!page.items.length) {
    list = null;
    showNothing(true);
  } else {
    if (!list) {
      list = emptyTable("Jobs, newest first");
      fill(by("list"), array ? h("p", { class: "note" }, "Tasks of one array. ", h("a", { href: "/jobs" }, "All jobs")) : null, list);
    }
    draw(list, page.items);
  }
  by("older").disabled = !next;
  by("newer").disabled = !cursor;
  fill(by("where"), page.items.length ? [`${page.items.length} jobs, submitted `, at(page.items.at(-1).submitted_at), " to ", at(page.items[0].submitted_at)] : "");
}

async function show() {
  by("pages").hidden = isGrouped();
  shown.clear();
  await (isGrouped() ? showGroups() : showList());
  for (const id of chosen.keys()) if (shown.has(id)) chosen.set(id, shown.get(id)); else chosen.delete(id);
  showChosen();
  history.replaceState(null, "", withQuery("/jobs", { ...filters(), state: form.elements.state.value, array, cursor }));
}

/** Offer what can be done with all that are ticked. */
function showChosen() {
  by("bulk").hidden = !chosen.size;
  if (!chosen.size) return;
  const act = (name, text, kind) => h("button", { type: "button", class: kind, "data-focus": name, onclick: () => changeAll(name, text) }, text);
  fill(by("bulk"), h("span", {}, `${counted(chosen.size, "entry").replace("entrys", "entries")} chosen`), act("hold", "Hold", ""), act("release", "Release", ""), act("cancel", "Cancel", "danger"),
    h("button", { type: "button", class: "quiet", onclick: () => { chosen.clear(); redraw(); } }, "Choose none"));
}

async function changeAll(name, text) {
  const targets = [...chosen.values()].filter((job) => !job.ended_at);
  if (!targets.length) return void notice("What is chosen has ended.");
  const what = targets.length === 1 ? targets[0].name : `${count(targets.length)} jobs and arrays`;
  if (!(await confirmed(`${text} ${what}?${name === "cancel" ? " This cannot be undone." : ""}`, text))) return;
  const refusals = [];
  const queue = [...targets];
  await Promise.all(Array.from({ length: AT_ONCE }, async () => {
    for (let job = queue.pop(); job; job = queue.pop()) {
      try { await send("POST", `${pathOf(job)}/${name}`); } catch (error) { refusals.push(`${job.name}: ${error.message}`); }
    }
  }));
  const asked = targets.length - refusals.length;
  if (asked) notice(`${text}: ${counted(asked, "request")} accepted.`, "good");
  if (refusals.length) notice(`${counted(refusals.length, "request")} refused. ${refusals.slice(0, 3).join(" ")}`);
  chosen.clear();
  redraw();
}

// Filters that somebody keeps, in this browser.
function saved() {
  try { return JSON.parse(localStorage.getItem(SAVED)) ?? []; } catch { return []; }
}

function keep(filtersKept) {
  try { localStorage.setItem(SAVED, JSON.stringify(filtersKept)); } catch { notice("This browser keeps nothing."); }
  showSaved();
}

function showSaved() {
  const here = withQuery("/jobs", { ...filters(), state: form.elements.state.value });
  const kept = saved();
  fill(by("saved"), kept.map(({ name, path }) => h("span", { class: "chip" }, h("a", { href: path, "aria-current": path === here ? "true" : null }, name),
    h("button", { type: "button", class: "quiet", "aria-label": `Forget ${name}`, onclick: () => keep(saved().filter((each) => each.path !== path)) }, "×"))),
  here !== "/jobs" && !kept.some((each) => each.path === here) ? h("button", { type: "button", class: "quiet", onclick: () => {
    const name = [form.elements.state.value && form.elements.state.selectedOptions[0].text, ...Object.values(filters())].filter(Boolean).join(" · ");
    keep([...saved(), { name, path: here }].slice(-12));
  } }, "Keep this filter") : null);
}

const turn = (to) => { cursor = to; list = groups = null; chosen.clear(); trying(show).then(() => { showSaved(); scrollTo({ top: 0 }); }); };

form.addEventListener("submit", (event) => { event.preventDefault(); before.length = 0; turn(null); });
form.elements.state.addEventListener("change", () => form.requestSubmit());
by("older").addEventListener("click", () => { before.push(cursor); turn(next); });
by("newer").addEventListener("click", () => turn(before.pop() ?? null));

showSaved();
const refresh = live([], 1_500, show);
onJobs((event) => {
  if (!cursor || shown.has(event.job_id)) refresh();
});
live(["footprints"], 15_000, refresh); // energy grows without events
