// The first page: the grid, the power, the jobs and the carbon of now.
import { all, get } from "./api.js";
import { Chart, colour, faded, meter, stepped } from "./charts.js";
import { by, fill, h, reconcile, table } from "./dom.js";
import { at, badge, carbon, count, counted, duration, figure, intensity, percent, power, relativeChange, time, unknown, words } from "./format.js";
import { GridChart, current, greenest } from "./grid.js";
import { RUNNING, endOf, progressOf, shareOf } from "./progress.js";
import { Ring, every, live, onJobs, throttled } from "./live.js";
import { me, trying } from "./shell.js";

const DAY_S = 86400;
const SHOWN = 6;
const LOOKED_AT = 50; // of the running and waiting jobs, each time one changes
const LATEST = 30;

const chart = new GridChart(by("grid-chart"));
let outlook = null;

async function showCounts() {
  const counts = await get("/v1/jobs:counts");
  const running = counts.running + counts.starting + counts.preempting;
  const part = (name, value, states) => h("a", { href: `/jobs?state=${states.join()}` },
    figure(value, count, { class: "big", id: `count-${name}` }), h("span", {}, name));
  fill(by("counts"), h("div", { class: "trio" }, part("running", running, RUNNING),
    part("waiting", counts.queued, ["queued"]), part("held", counts.held, ["held"])));
  await Promise.all([running ? showRunning() : fill(by("running"), h("p", { class: "empty" }, "Nothing runs.")),
    counts.queued + counts.held ? showWaiting(counts) : fill(by("waiting"), h("p", { class: "empty" }, "Nothing waits."))]);
}

async function showRunning() {
  const found = (await get("/v1/jobs", { state: RUNNING, limit: LOOKED_AT, fields: "id,name,project,user,state,gpus,progress,started_at" })).items;
  // Servers of pools and applications report no progress, and need no looking after.
  const items = [...found.filter((job) => shareOf(job) !== null), ...found.filter((job) => shareOf(job) === null)].slice(0, SHOWN);
  const row = (job) => h("tr", {}, h("td", { class: "name" }, h("a", { href: `/jobs/${job.id}` }, job.name), h("small", {}, [job.project, job.user].filter(Boolean).join(" · "))),
    h("td", { class: "number" }, job.gpus ? counted(job.gpus, "GPU") : words(job.state)), h("td", { class: "share", "data-label": shareOf(job) === null ? "progress" : null }, progressOf(job)), h("td", { class: "time", "data-label": "ends" }, endOf(job)));
  fill(by("running"), table("Running jobs, those that report progress first", [["Job"], ["Holds", "number"], ["Progress"], ["Ends, at its pace"]], items.map(row), { class: "stack" }));
}

/** Show each reason with the number of jobs that it holds, and of the newest of them when they are expected to start. */
async function showWaiting(counts) {
  const items = (await Promise.all([["queued", LOOKED_AT], ["held", 1]].map(([state, limit]) => get("/v1/jobs", { state, limit, fields: "id,name,state,reason,detail,expected_start_at" })))).flatMap((page) => page.items);
  const reasons = Object.entries(counts.waiting).sort((a, b) => b[1] - a[1]).slice(0, SHOWN);
  fill(by("waiting"), table("Reasons why jobs wait", [["Why"], ["Jobs", "number"], ["Next expected start"]], reasons.map(([reason, number]) => {
    const these = items.filter((job) => (job.reason || job.state) === reason);
    const next = these.map((job) => job.expected_start_at).filter(Boolean).sort()[0];
    return h("tr", {}, h("td", { class: "name" }, words(reason), these.length ? h("small", {}, these[0].detail ?? "", these[0].detail ? " " : "", h("a", { href: `/jobs/${these[0].id}` }, these[0].name)) : null),
      h("td", { class: "number" }, count(number)), h("td", { class: "time", "data-label": "next start" }, next ? at(next) : reason === "held" ? "when released" : unknown()));
  }), { class: "stack" }));
}

async function showCarbon() {
  const start = new Date();
  start.setHours(0, 0, 0, 0);
  const report = await get("/v1/reports/footprint", { group_by: "tenant", start: start.toISOString(), limit: 1 });
  const { carbon_gco2: used } = report.total;
  const baseline = report.total_accounts.baseline_gco2;
  const share = relativeChange(used, baseline);
  fill(by("carbon"),
    figure(used, carbon, { class: "big", id: "carbon-today" }),
    h("p", { class: "note" },
      baseline === null ? ["At the mean intensity: ", unknown(), "."] : ["At the mean intensity: ", figure(baseline, carbon, { id: "carbon-baseline" }),
        share === null ? "" : Math.abs(share) < 0.005 ? ": the same" : h("span", { class: share < 0 ? "up-is-good" : "up-is-bad" }, `: ${percent(Math.abs(share))} ${share < 0 ? "less" : "more"}`), "."],
      share > 0.005 ? [" The hours of use were dirtier than the mean; jobs that may wait (", h("code", {}, "--flexible"), ", ", h("a", { href: "/policies" }, "slack_s"), ") can avoid such hours."] : ""),
    h("p", { class: "note" }, h("span", { title: "The baseline is the same energy at its zone's mean intensity since midnight." }, me.isOperator ? "All tenants and idle GPUs since midnight." : "Your tenant since midnight.")));
}

const SAVED_DAYS = 9;

/** Show what the stored replay of the newest day says the levers saved, with its interval and what it cost in time. */
async function showSaved() {
  const { days } = await get("/v1/reports/savings", { start: new Date(Date.now() - SAVED_DAYS * DAY_S * 1000).toISOString() });
  const day = days.filter((each) => each.levers.length).at(-1);
  if (!day) return void fill(by("saved"), h("div", { class: "big" }, unknown()), h("p", { class: "note" }, "Known after the first whole day with jobs that ended: it is replayed at night under a baseline."));
  const later = (s) => s === null ? "" : `, jobs ending ${duration(Math.abs(s))} ${s < 0 ? "earlier" : "later"} on average`;
  const slack = day.slack_saved_gco2 > 0 ? `${duration(day.slack_s)} of slack would have saved ${carbon(day.slack_saved_gco2)} more${later(day.slack_later_s)}.` : "";
  const unanswered = day.levers.filter((each) => !each.known).map((each) => words(each.lever)).join(", ");
  fill(by("saved"),
    figure(day.saved_gco2, carbon, { class: "big", id: "saved-day" }),
    h("p", { class: "note" }, `${day.day}, against the same jobs under fifo: ${carbon(day.low_gco2)} to ${carbon(day.high_gco2)} at 90 %${later(day.later_s)}.`),
    h("p", { class: "note" }, day.levers.filter((each) => each.known).map((each) => `${words(each.lever)} ${carbon(each.saved_gco2)}`).join(", ")),
    unanswered ? h("p", { class: "note" }, `Not known, as no history tells how jobs answer to it: ${unanswered}.`) : "",
    day.why || slack ? h("p", { class: "note" }, [day.why, slack].filter(Boolean).join(" ")) : "");
}

const powerChart = new Chart(by("power-chart"), () => ({
  unit: "kW", format: (value) => Number(value.toPrecision(3)), legend: false,
  x: { range: () => powerSpan() },
  series: [
    { label: "all", stroke: colour("accent"), width: 2, fill: faded(colour("accent"), 0.12), paths: stepped },
    { label: "idle", stroke: colour("muted"), width: 1, dash: [4, 3], paths: stepped },
  ],
}));

/** A day, or as much of it as the ledger has, two hours at least. */
function powerSpan() {
  const now = Date.now() / 1000;
  return [Math.max(now - DAY_S, Math.min(powerChart.data[0][0], now - 7_200)), now];
}

/** Draw the mean power of each hour; an hour in which nothing reported is a gap. */
async function showHours() {
  const { items } = await get("/v1/reports/hours", { start: new Date(Date.now() - DAY_S * 1000 - 3_600_000).toISOString() });
  const rows = [[], [], []];
  let end = null;
  const push = (s, all, idle) => [s, all, idle].forEach((value, i) => rows[i].push(value));
  for (const each of items.filter((hour) => hour.covered_s > 0)) {
    const begins = new Date(each.start_at) / 1000;
    if (end !== null && begins > end) push(end, null, null);
    const kw = (joules) => (joules === null ? null : joules / each.covered_s / 1000);
    push(begins, kw(each.energy_j), kw(each.idle_energy_j));
    end = begins + 3600;
  }
  if (end !== null) push(Math.min(end, Date.now() / 1000), rows[1].at(-1), rows[2].at(-1));
  if (!powerChart.plot) fill(by("power-chart"), rows[0].length ? null : h("p", { class: "empty" }, "The ledger has no hour yet."));
  if (rows[0].length) powerChart.show(rows, `Mean power of each hour of the past day, ${power(1000 * rows[1].at(-1))} in the newest`);
}

async function showPower() {
  const items = await all("/v1/nodes", { clocks: false }, 100_000);
  const up = items.filter((node) => node.state !== "lost");
  const drawn = up.reduce((sum, node) => sum + node.power_w, 0);
  let limit = 0;
  for (const node of up) {
    const limits = new Map(node.readings.map((each) => [each.index, each.enforced_limit_w ?? each.power_limit_w]));
    for (const device of node.devices) if (device.parent === undefined || device.parent === null) limit += limits.get(device.index) ?? device.power_limit_w;
  }
  const gpus = up.reduce((sum, node) => sum + node.gpus, 0);
  const used = up.reduce((sum, node) => sum + node.gpus_in_use, 0);
  const lost = items.length - up.length;
  const orders = (await get("/v1/grid/orders", { limit: 500 })).items.filter((order) => ["announced", "in_force"].includes(order.state));
  fill(by("power"),
    h("div", { class: "big" }, figure(drawn, power, { id: "power-now" }), h("small", {}, ` of ${power(limit)}`)),
    meter(drawn, limit, `${power(drawn)} of the GPUs' power limits, ${power(limit)}`),
    h("p", { class: "note" }, `${count(used)} of ${count(gpus)} GPUs in use`, lost ? h("span", { class: "problem" }, `, ${lost} of ${items.length} nodes lost`) : ` on ${count(up.length)} nodes`),
    ...orders.map((order) => h("p", { class: "note grid-order" }, `Order of the grid${order.zone ? ` in ${order.zone}` : ""}: `,
      order.state === "announced" ? "from " : `${order.limit_w === null ? "no limit" : `at most ${power(order.limit_w)}`} until `, at(order.state === "announced" ? order.start_at : order.end_at),
      order.shortfall ? h("span", { class: "problem" }, ` ${order.shortfall}`) : "")));
}

async function showPolicy() {
  const active = await get("/v1/policies/active");
  fill(by("policy"), "Policy: ", h("a", { href: "/policies", id: "policy-name" }, active.name), ", in force since ", at(active.since), active.problem ? h("span", { class: "problem" }, ` ${active.problem}`) : ".");
}

async function listZones() {
  const zones = (await get("/v1/carbon/zones")).items;
  if (!zones.some((each) => each.zone === me.zone)) zones.unshift({ zone: me.zone, name: me.zone });
  fill(by("zone"), zones.map((each) => h("option", { value: each.zone, selected: each.zone === me.zone }, each.name)));
}

async function showGrid() {
  const zone = by("zone").value || me.zone;
  outlook = await get(`/v1/carbon/${encodeURIComponent(zone)}/outlook`, { past_s: DAY_S / 2, ahead_s: DAY_S, clock: "grid" });
  drawGrid();
}

function drawGrid() {
  if (!outlook) return;
  const hours = Number(by("window").value);
  const now = current(outlook);
  const window = greenest(outlook, hours);
  const below = window && now ? now.gco2_per_kwh - window.mean : 0;
  const change = window && now ? relativeChange(window.mean, now.gco2_per_kwh) : null;
  const isBetter = below > 0.005 * Math.abs(now?.gco2_per_kwh ?? 0);
  fill(by("grid-figures"),
    h("div", {}, figure(now?.gco2_per_kwh ?? null, intensity, { class: "big", id: "intensity-now" }),
      h("p", { class: "note" }, outlook.is_stale ? h("span", { class: "problem" }, "Stale: the latest value known") : now?.kind === "measured" ? "now, measured" : "now, the last measured value")),
    h("div", { class: "greenest" }, window
      ? [figure(window.mean, intensity, { class: "big", id: "intensity-greenest" }), h("p", { class: "note" }, `greenest ${hours} h ahead: `,
        at(window.from * 1000), " to ", at(window.to * 1000), isBetter ? `, ${change === null ? intensity(below) : percent(-change)} below now` : ", no better than now")]
      : [h("span", { class: "big" }, unknown()), h("p", { class: "note" }, `the forecast is shorter than ${hours} h`)]));
  chart.show(outlook, window, hours);
  const replay = Math.abs(new Date(outlook.grid_now) - new Date(outlook.now)) > DAY_S * 1000;
  fill(by("grid-note"), `Source: ${outlook.provider}, ${words(outlook.signal)} emissions`,
    outlook.forecast_generated_at ? [", forecast of ", at(outlook.forecast_generated_at)] : "", ".",
    replay ? [" A recording is replayed", outlook.time_scale === 1 ? "" : ` ${outlook.time_scale} times as fast`, ": by the grid's clock it is ",
      new Date(outlook.grid_now).toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" }), "."] : "");
}

const latest = new Ring(LATEST);
const names = new Map(); // of the jobs in it
function showLatest() {
  if (!latest.items.length) return void fill(by("latest"), h("li", {}, h("span", { class: "unknown" }, "Nothing yet.")));
  reconcile(by("latest"), [...latest.items].reverse(), { key: (each) => each.id, stamp: (each) => names.get(each.job_id) ?? "", make: (each) => h("li", {},
    at(each.at, time), badge(each.type.replace("job.", "")), h("a", { href: `/jobs/${each.job_id}` }, names.get(each.job_id) ?? each.job_id)) });
}

/** Begin with the newest jobs: events come only from now on. */
async function fillLatest() {
  const { items } = await get("/v1/jobs", { limit: 12, fields: "id,name,state,submitted_at,started_at,ended_at" });
  for (const job of items.reverse()) {
    latest.push({ id: job.id, job_id: job.id, name: job.name, at: job.ended_at ?? job.started_at ?? job.submitted_at, type: `job.${job.state}` });
    names.set(job.id, job.name);
  }
  latest.items.sort((a, b) => new Date(a.at) - new Date(b.at));
  showLatest();
}

/** Learn the names of jobs that are new here, one request for as many as came together. */
const learn = throttled(() => trying(async () => {
  const missing = latest.items.map((each) => each.job_id).filter((id) => !names.has(id));
  if (missing.length) for (const job of (await get("/v1/jobs", { limit: LATEST, fields: "id,name" })).items) names.set(job.id, job.name);
  const kept = new Set(latest.items.map((each) => each.job_id));
  for (const id of names.keys()) if (!kept.has(id)) names.delete(id);
  showLatest();
}), 2000);

trying(fillLatest);
live(["jobs"], 2_000, showCounts);
onJobs((event) => {
  latest.push(event);
  if (by("latest").querySelector(".unknown")) by("latest").replaceChildren();
  showLatest();
  learn();
});
live(["footprints"], 15_000, showCarbon);
if (me.isOperator) {
  every(600_000, live([], 5_000, showSaved)); // no event tells of a night's replay
  live(["nodes"], 5_000, showPower);
} else for (const name of ["saved", "power"]) by(name).closest("section").hidden = true;
live(["footprints"], 60_000, showHours);
live(["policies"], 2_000, showPolicy);
trying(listZones).then(() => {
  const refresh = live(["carbon"], 5_000, () => showGrid().catch((error) => {
    fill(by("grid-figures"), h("p", { class: "problem" }, error.message));
    by("grid-chart").classList.remove("loading");
    throw error;
  }));
  every(60_000, refresh); // time passes without anybody's writing
});
by("zone").addEventListener("change", () => trying(showGrid));
by("window").addEventListener("change", drawGrid);
