// Energy and emissions of a period, as the ledger has them.
import { get, withQuery } from "./api.js";
import { by, facts, fill, h, table } from "./dom.js";
import { carbon, count, counted, digits, duration, energy, figure, gpuHours, intensity, percent, relativeChange, unknown, within, words } from "./format.js";
import { Chart, colour, faded, meter } from "./charts.js";
import { persistently } from "./live.js";
import { busy } from "./forms.js";
import { me, notice, trying } from "./shell.js";

const ROWS = { class: "rows" };
const PAGE = 100;
const MOST = 10_000;
let limit = PAGE;
const form = by("filters");
let lines = [];
let cursor = null;
let asked = {};
let endAt = null;

/** Return the period as `{start, end}`, days being those of the viewer. */
function period() {
  const now = new Date();
  const midnight = (months, date) => new Date(now.getFullYear(), now.getMonth() + months, date).toISOString();
  switch (form.elements.period.value) {
    case "today": return { start: midnight(0, now.getDate()) };
    case "month": return { start: midnight(0, 1) };
    case "last-month": return { start: midnight(-1, 1), end: midnight(0, 1) };
    case "custom": {
      const [from, to] = [form.elements.from.value, form.elements.to.value];
      const after = to ? new Date(`${to}T00:00`) : null;
      after?.setDate(after.getDate() + 1);
      return { start: from ? new Date(`${from}T00:00`).toISOString() : null, end: after?.toISOString() };
    }
    default: return { start: midnight(0, now.getDate() - 6) }; // by the calendar: where a clock changes, a day has 23 or 25 hours
  }
}

function showTotal(report) {
  const { total, idle, total_accounts: accounts } = report;
  const share = relativeChange(total.carbon_gco2, accounts.baseline_gco2);
  fill(by("total"), facts([
    ["Emissions, location-based", figure(total.carbon_gco2, carbon, { class: "big", id: "total-carbon" }), within(accounts.half_width?.carbon_gco2, total.carbon_gco2)],
    ["Energy", figure(total.energy_j, energy, { class: "big", id: "total-energy" }), within(accounts.half_width?.energy_j, total.energy_j)],
    ["At the mean intensity", figure(accounts.baseline_gco2, carbon), share === null ? null : h("span", { class: `sub ${share <= 0 ? "up-is-good" : "up-is-bad"}` }, Math.abs(share) < 0.0005 ? "the same" : `${percent(Math.abs(share))} ${share < 0 ? "less" : "more"} emitted`)],
    ["Market-based", figure(accounts.market_gco2, carbon)],
    ["Embodied", figure(accounts.embodied_gco2, carbon)],
    ["GPU time", figure(total.gpu_s, gpuHours)],
    ["Idle", figure(idle.energy_j, energy), total.energy_j > 0 ? h("span", { class: "sub" }, `${percent(idle.energy_j / total.energy_j)} of the energy`) : null],
    ["Rests on estimates", total.carbon_gco2 > 0 ? percent(accounts.estimated_gco2 / total.carbon_gco2) : "–"],
    ["GPUs by their own counters", figure(report.metered_gpu_energy_j, energy), h("span", { class: "sub" }, `ledger ${energy(total.gpu_energy_j)}`)],
  ]), accounts.unknown.length ? h("p", { class: "note" }, `Unknown: ${accounts.unknown.join(", ")}.`) : null,
  h("p", { class: "note" }, `Signals: ${report.signals.map(words).join(", ") || "none"}. The baseline is the same energy at its zone's mean intensity in the period. ± is the 90 % interval; that of a sum is less than its parts'.`));
}

const CHOICES = ["period", "from", "to", "group", "project"];

/** Return the address of the page with what is chosen, and `changes`. */
const address = (changes = {}) => withQuery("/reports", { ...Object.fromEntries(CHOICES.map((name) => [name, form.elements[name].value])), ...changes });

/** Where the jobs of a group, or the group itself, can be looked at: of a project its jobs in the period, of a job its lines. */
const LINKS = { job: (name) => (name.startsWith("array_") ? `/jobs?array=${name}` : `/jobs/${name}#lines`), project: (name) => address({ project: name, group: "job" }),
  user: (name) => (name === "(unknown)" ? null : `/jobs?user=${encodeURIComponent(name)}`), tenant: (name) => `/jobs?tenant=${encodeURIComponent(name)}`, node: (name) => (me.isOperator ? `/nodes#${encodeURIComponent(name)}` : null) };

function showGroups({ idle, idle_accounts: idleAccounts, total, total_accounts: totalAccounts }) {
  const dimension = form.elements.group.value;
  const rows = [...lines, { footprint: idle, accounts: idleAccounts }, { footprint: total, accounts: totalAccounts }];
  const column = (words, of) => words.of(rows.map(of));
  const [grams, base] = [column(carbon, (each) => each.footprint.carbon_gco2), column(carbon, (each) => each.accounts.baseline_gco2)];
  const [joules, hours] = [column(energy, (each) => each.footprint.energy_j), column(gpuHours, (each) => each.footprint.gpu_s)];
  const row = (name, { footprint, accounts, jobs }, kind) => h("tr", { class: kind },
    h("td", { class: "name" }, name),
    h("td", { class: "number" }, figure(footprint.carbon_gco2, grams), within(accounts.half_width?.carbon_gco2, footprint.carbon_gco2)), h("td", { class: "share" }, meter(footprint.carbon_gco2, total.carbon_gco2, percent(total.carbon_gco2 > 0 ? footprint.carbon_gco2 / total.carbon_gco2 : 0))),
    h("td", { class: "number" }, figure(accounts.baseline_gco2, base)), h("td", { class: "number" }, figure(footprint.energy_j, joules), within(accounts.half_width?.energy_j, footprint.energy_j)),
    h("td", { class: "number" }, figure(footprint.gpu_s, hours)), h("td", { class: "number" }, jobs === undefined ? "" : count(jobs)));
  const linked = ({ group, name }) => { const href = LINKS[dimension]?.(group); return href ? h("a", { href }, name ?? group) : name ?? group; };
  fill(by("groups"), lines.length || total.energy_j ? table("Energy and emissions by group", [[dimension], ["Carbon", "number"], ["Of the total"], ["At the mean", "number"], ["Energy", "number"], ["GPU time", "number"], ["Jobs", "number"]], [
    ...lines.map((each) => row(linked(each), each)),
    cursor ? h("tr", {}, h("td", { colspan: "7", class: "note" }, "More groups follow.")) : null,
    me.isOperator ? row("idle", { footprint: idle, accounts: idleAccounts }, "sum") : null, row("total", { footprint: total, accounts: totalAccounts }, "sum")].filter(Boolean), ROWS) : h("p", { class: "empty" }, "Nothing was used in this period."));
  by("more").hidden = !cursor || limit === MOST;
  by("csv").disabled = !lines.length;
}

const trend = new Chart(by("trend"), () => ({
  unit: "kg", format: (value) => Number(value.toPrecision(3)), legend: false,
  x: { range: () => trendSpan },
  series: [
    { label: "all", stroke: colour("accent"), fill: faded(colour("accent"), 0.35), width: 1, paths: bars },
    { label: "idle", stroke: colour("muted"), fill: faded(colour("muted"), 0.45), width: 1, paths: bars },
  ],
}));
const bars = globalThis.uPlot?.paths.bars({ size: [0.7, 60] });
let trendSpan = [0, 1];
const LONGEST_TREND_MS = 99 * 86_400_000;

/** Draw the emissions of each of the viewer's days, and the part of idle GPUs. */
async function showTrend(start, end) {
  const until = end ? new Date(end) : new Date();
  const from = Math.max(start ? new Date(start).getTime() : 0, until - LONGEST_TREND_MS);
  const { items } = await get("/v1/reports/hours", { start: new Date(from).toISOString(), end: until.toISOString() });
  const days = new Map();
  for (const hour of items) {
    const day = new Date(hour.start_at);
    day.setHours(0, 0, 0, 0);
    const sum = days.get(day.getTime()) ?? [0, 0];
    days.set(day.getTime(), [sum[0] + hour.carbon_gco2 / 1000, sum[1] + (hour.idle_carbon_gco2 ?? 0) / 1000]);
  }
  by("trend-card").hidden = days.size < 2;
  if (days.size < 2) return;
  const all = [...days].sort(([a], [b]) => a - b);
  const noon = (ms) => ms / 1000 + 43_200;
  trendSpan = [noon(all[0][0]) - 43_200, noon(all.at(-1)[0]) + 43_200];
  trend.show([all.map(([ms]) => noon(ms)), all.map(([, [sum]]) => sum), all.map(([, [, idle]]) => idle)], `Emissions of ${count(days.size)} days, ${carbon(1000 * all.at(-1)[1][0])} on the last`);
  fill(by("trend-note"), `kg CO₂ a day${me.isOperator ? ", grey: of idle GPUs" : ""}.${start && new Date(start).getTime() < from ? " The newest 99 days." : ""}`);
}

/** Show what the stored replays of the period's days say that each lever saved. */
async function showLevers(start, end) {
  const { days, total } = await get("/v1/reports/savings", { start, end });
  if (!total?.levers.length) return void fill(by("levers"), h("p", { class: "empty" }, "No day of this period has been replayed. Each night the day before is, if jobs of it have ended."));
  const later = (s) => (s === null ? unknown() : Math.abs(s) < 1 ? "the same" : `${duration(Math.abs(s))} ${s < 0 ? "earlier" : "later"}`);
  const grams = carbon.of(total.levers.map((each) => each.saved_gco2));
  fill(by("levers"),
    facts([["Saved in all", figure(total.saved_gco2, carbon, { class: "big", id: "saved-total" }), h("span", { class: "sub" }, `${carbon(total.low_gco2)} to ${carbon(total.high_gco2)} at 90 %`)],
      ["Against", "the same jobs under fifo, never asleep", h("span", { class: "sub" }, `${counted(days.filter((each) => each.jobs).length, "day")} replayed, ${counted(total.jobs, "job")}`)],
      ["Jobs end, on average", later(total.later_s)],
      total.slack_saved_gco2 > 0 ? [`With ${duration(total.slack_s)} of slack`, `${carbon(total.slack_saved_gco2)} more`, h("span", { class: "sub" }, later(total.slack_later_s))] : null]),
    table("Saved by each lever", [["Lever"], ["Saved", "number"], ["At 90 %", "number"], ["Jobs end", "number"]], total.levers.map((each) => h("tr", {}, h("td", {}, words(each.lever)),
      h("td", { class: "number" }, each.known ? figure(each.saved_gco2, grams) : unknown()), h("td", { class: "number" }, each.known ? `${grams(each.low_gco2)} to ${grams(each.high_gco2)}` : ""), h("td", { class: "number" }, each.known ? later(each.later_s) : ""))), ROWS),
    total.levers.every((each) => each.known) ? null : h("p", { class: "note" }, "Unknown: no history tells how jobs answer to that lever."),
    total.why ? h("p", { class: "note" }, total.why) : null);
}

function showRest(report, requests) {
  fill(by("zones"), report.zones.length ? table("Zones", [["Zone"], ["Mean", "number"], ["Contracts", "number"]], report.zones.map((each) => h("tr", {}, h("td", {}, each.zone), h("td", { class: "number" }, figure(each.mean_gco2_per_kwh, intensity)), h("td", { class: "number" }, figure(each.market_gco2_per_kwh, intensity))))) : h("p", { class: "empty" }, "No zone."));
  fill(by("units"), report.units.length ? table("Software carbon intensity", [["Unit"], ["Amount", "number"], ["Jobs", "number"], ["Operational", "number"], ["Per unit (SCI)", "number"]], report.units.map((each) => h("tr", {}, h("td", {}, each.unit), h("td", { class: "number" }, digits(each.amount)), h("td", { class: "number" }, count(each.jobs)),
    h("td", { class: "number" }, carbon(each.operational_gco2)), h("td", { class: "number" }, figure(each.sci_gco2_per_unit, carbon)))), ROWS) : h("p", { class: "empty" }, "No job has succeeded wholly in this period."));
  const asked = (requests?.lines ?? []).map((each) => ({ ...each, joules: each.energy_j + each.outside_energy_j, grams: each.carbon_gco2 + each.outside_carbon_gco2, tokens: each.input_tokens + each.output_tokens }));
  const each1000 = ({ grams, tokens }) => (tokens ? (grams / tokens) * 1000 : null);
  const [joules, grams, per1000] = [energy.of(asked.map((each) => each.joules)), carbon.of(asked.map((each) => each.grams)), carbon.of(asked.map(each1000))];
  fill(by("requests"), requests?.lines.length ? table("Requests by model", [["Model"], ["Requests", "number"], ["Input tokens", "number"], ["Output tokens", "number"], ["Energy", "number"], ["Carbon", "number"], ["Per 1,000 tokens", "number"]], asked.map((each) => {
    const estimated = each.estimated_requests ? " (partly estimated)" : "";
    return h("tr", {}, h("td", { class: "name" }, each.group), h("td", { class: "number" }, count(each.requests)), h("td", { class: "number" }, count(each.input_tokens) + estimated), h("td", { class: "number" }, count(each.output_tokens) + estimated),
      h("td", { class: "number" }, joules(each.joules)), h("td", { class: "number" }, grams(each.grams)), h("td", { class: "number" }, figure(each1000(each), per1000)));
  }), ROWS) : h("p", { class: "empty" }, "No requests in this period."));
}

async function show() {
  for (const each of form.querySelectorAll(".custom")) each.hidden = form.elements.period.value !== "custom";
  history.replaceState(null, "", address());
  by("project").hidden = !form.elements.project.value;
  fill(by("project"), "Only the project ", h("strong", {}, form.elements.project.value), ". ", h("a", { href: address({ project: null, group: "project" }) }, "All projects"), " · ", h("a", { href: withQuery("/jobs", { project: form.elements.project.value }) }, "its jobs now"));
  asked = { ...period(), group_by: form.elements.group.value, project: form.elements.project.value, limit };
  const report = await get("/v1/reports/footprint", asked); // all of one moment, at which the requests end too
  const whole = !asked.project; // what follows is of the installation, or of the tenant
  for (const name of ["trend", "levers", "requests"]) by(`${name}-card`)?.toggleAttribute("hidden", !whole);
  ({ lines, next_cursor: cursor, end_at: endAt } = report);
  showTotal(report);
  showGroups(report);
  showRest(report, whole ? await get("/v1/reports/requests", { group_by: "model", start: asked.start, end: report.end_at }) : null);
  if (!whole) return;
  await Promise.all([showTrend(asked.start, report.end_at), me.isOperator ? showLevers(asked.start, asked.end) : null]);
}

const named = (ending) => `wattshift-${asked.group_by}-${(asked.start ?? "all").slice(0, 10)}.${ending}`;

function save(text, type, name) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Save what the page shows as one file: its style within, its charts as pictures, nothing that asks a server. */
async function savePage() {
  const copy = document.documentElement.cloneNode(true);
  const style = await (await fetch(document.querySelector('link[href$="app.css"]').href)).text();
  for (const each of copy.querySelectorAll("script, link, meta[name=csrf-token], header.site, footer.site, .skip, #notices, .buttons, form, .pager")) each.remove();
  const charts = document.querySelectorAll("canvas");
  copy.querySelectorAll("canvas").forEach((each, i) => each.replaceWith(h("img", { src: charts[i].toDataURL(), alt: charts[i].closest("[aria-label]")?.getAttribute("aria-label") ?? "", style: `width:${charts[i].style.width}` })));
  for (const each of copy.querySelectorAll("a[href^='/']")) each.setAttribute("href", new URL(each.getAttribute("href"), location.href).href);
  copy.querySelector("head").append(h("style", {}, style));
  copy.querySelector("h1").after(h("p", { class: "note" }, `${asked.start ? new Date(asked.start).toLocaleString("en-GB") : "From the beginning"} to ${new Date(endAt).toLocaleString("en-GB")}, by ${asked.group_by}. Made ${new Date().toLocaleString("en-GB")}.`));
  save(`<!doctype html>\n${new XMLSerializer().serializeToString(copy)}`, "text/html", named("html"));
}

function download() {
  const names = ["group", "name", "jobs", "energy_j", "gpu_energy_j", "carbon_gco2", "baseline_gco2", "gpu_s", "estimated_energy_j", "energy_half_width_j", "carbon_half_width_gco2"];
  const cell = (value) => { // a spreadsheet would take a text that begins so for a formula
    const text = value === null || value === undefined ? "" : String(value);
    return `"${(typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };
  const rows = lines.map(({ group, name, jobs, footprint, accounts }) => names.map((key) => cell({ group, name, jobs, ...footprint, baseline_gco2: accounts.baseline_gco2, energy_half_width_j: accounts.half_width?.energy_j, carbon_half_width_gco2: accounts.half_width?.carbon_gco2 }[key])).join());
  save(`${[names.join(), ...rows].join("\r\n")}\r\n`, "text/csv", named("csv"));
  if (cursor) notice("Only the groups that are shown are in the file; press More for the rest.", "good");
}

for (const [name, value] of new URLSearchParams(location.search)) if (CHOICES.includes(name)) form.elements[name].value = value;
if (!form.elements.period.value) form.elements.period.value = "7";
if (!form.elements.group.value) form.elements.group.value = "project";
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", () => { limit = PAGE; return trying(show); });
by("more").addEventListener("click", (event) => { limit = Math.min(2 * limit, MOST); return busy(event.target, () => trying(show)); });
by("csv").addEventListener("click", download);
by("html").addEventListener("click", (event) => busy(event.target, () => trying(savePage)));
by("print").addEventListener("click", () => print());
persistently(show);
