// Energy and emissions of a period, as the ledger has them.
import { get } from "./api.js";
import { by, facts, fill, h, table } from "./dom.js";
import { carbon, count, digits, energy, figure, gpuHours, intensity, percent, relativeChange, unknown, within, words } from "./format.js";
import { meter } from "./charts.js";
import { busy } from "./forms.js";
import { notice, trying } from "./shell.js";

const PAGE = 100;
const MOST = 10_000;
let limit = PAGE;
const form = by("filters");
let lines = [];
let cursor = null;
let asked = {};

/** Return the period as `{start, end}`, days being those of the viewer. */
function period() {
  const day = new Date();
  day.setHours(0, 0, 0, 0);
  const month = (offset) => new Date(day.getFullYear(), day.getMonth() + offset, 1).toISOString();
  switch (form.elements.period.value) {
    case "today": return { start: day.toISOString() };
    case "month": return { start: month(0) };
    case "last-month": return { start: month(-1), end: month(0) };
    case "custom": {
      const [from, to] = [form.elements.from.value, form.elements.to.value];
      const after = to ? new Date(`${to}T00:00`) : null;
      after?.setDate(after.getDate() + 1);
      return { start: from ? new Date(`${from}T00:00`).toISOString() : null, end: after?.toISOString() };
    }
    default: return { start: new Date(day.getTime() - 6 * 86_400_000).toISOString() };
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

function showGroups() {
  const column = (words, of) => words.of(lines.map(of));
  const [grams, base] = [column(carbon, (each) => each.footprint.carbon_gco2), column(carbon, (each) => each.accounts.baseline_gco2)];
  const [joules, hours] = [column(energy, (each) => each.footprint.energy_j), column(gpuHours, (each) => each.footprint.gpu_s)];
  const most = Math.max(0, ...lines.map((each) => each.footprint.carbon_gco2));
  fill(by("groups"), lines.length ? table("Energy and emissions by group", [[form.elements.group.value], ["Carbon", "number"], [""], ["At the mean", "number"], ["Energy", "number"], ["GPU time", "number"], ["Jobs", "number"]], lines.map((each) => h("tr", {},
    h("td", { class: "name" }, form.elements.group.value === "job" ? h("a", { href: `/jobs/${each.group}` }, each.name ?? each.group) : each.group),
    h("td", { class: "number" }, figure(each.footprint.carbon_gco2, grams), within(each.accounts.half_width?.carbon_gco2, each.footprint.carbon_gco2)), h("td", { class: "share" }, meter(each.footprint.carbon_gco2, most, percent(most ? each.footprint.carbon_gco2 / most : 0))),
    h("td", { class: "number" }, figure(each.accounts.baseline_gco2, base)), h("td", { class: "number" }, figure(each.footprint.energy_j, joules), within(each.accounts.half_width?.energy_j, each.footprint.energy_j)),
    h("td", { class: "number" }, figure(each.footprint.gpu_s, hours)), h("td", { class: "number" }, count(each.jobs))))) : h("p", { class: "empty" }, "Nothing was used in this period."));
  by("more").hidden = !cursor || limit === MOST;
  by("csv").disabled = !lines.length;
}

function showRest(report, requests) {
  fill(by("zones"), report.zones.length ? table("Zones", [["Zone"], ["Mean", "number"], ["Contracts", "number"]], report.zones.map((each) => h("tr", {}, h("td", {}, each.zone), h("td", { class: "number" }, figure(each.mean_gco2_per_kwh, intensity)), h("td", { class: "number" }, figure(each.market_gco2_per_kwh, intensity))))) : h("p", { class: "empty" }, "No zone."));
  fill(by("units"), report.units.length ? table("Software carbon intensity", [["Unit"], ["Amount", "number"], ["Jobs", "number"], ["Operational", "number"], ["Per unit (SCI)", "number"]], report.units.map((each) => h("tr", {}, h("td", {}, each.unit), h("td", { class: "number" }, digits(each.amount)), h("td", { class: "number" }, count(each.jobs)),
    h("td", { class: "number" }, carbon(each.operational_gco2)), h("td", { class: "number" }, figure(each.sci_gco2_per_unit, carbon))))) : h("p", { class: "empty" }, "No job has succeeded wholly in this period."));
  const asked = (requests?.lines ?? []).map((each) => ({ ...each, joules: each.energy_j + each.outside_energy_j, grams: each.carbon_gco2 + each.outside_carbon_gco2, tokens: each.input_tokens + each.output_tokens }));
  const each1000 = ({ grams, tokens }) => (tokens ? (grams / tokens) * 1000 : null);
  const [joules, grams, per1000] = [energy.of(asked.map((each) => each.joules)), carbon.of(asked.map((each) => each.grams)), carbon.of(asked.map(each1000))];
  fill(by("requests"), requests?.lines.length ? table("Requests by model", [["Model"], ["Requests", "number"], ["Input tokens", "number"], ["Output tokens", "number"], ["Energy", "number"], ["Carbon", "number"], ["Per 1,000 tokens", "number"]], asked.map((each) => {
    const estimated = each.estimated_requests ? " (partly estimated)" : "";
    return h("tr", {}, h("td", { class: "name" }, each.group), h("td", { class: "number" }, count(each.requests)), h("td", { class: "number" }, count(each.input_tokens) + estimated), h("td", { class: "number" }, count(each.output_tokens) + estimated),
      h("td", { class: "number" }, joules(each.joules)), h("td", { class: "number" }, grams(each.grams)), h("td", { class: "number" }, figure(each1000(each), per1000)));
  })) : h("p", { class: "empty" }, "No requests in this period."));
}

async function show() {
  for (const each of form.querySelectorAll(".custom")) each.hidden = form.elements.period.value !== "custom";
  asked = { ...period(), group_by: form.elements.group.value, limit };
  const report = await get("/v1/reports/footprint", asked); // all of one moment, at which the requests end too
  const requests = await trying(() => get("/v1/reports/requests", { group_by: "model", start: asked.start, end: report.end_at }));
  ({ lines, next_cursor: cursor } = report);
  showTotal(report);
  showGroups();
  showRest(report, requests);
}

function download() {
  const names = ["group", "name", "jobs", "energy_j", "gpu_energy_j", "carbon_gco2", "baseline_gco2", "gpu_s", "estimated_energy_j", "energy_half_width_j", "carbon_half_width_gco2"];
  const cell = (value) => { // a spreadsheet would take a text that begins so for a formula
    const text = value === null || value === undefined ? "" : String(value);
    return `"${(typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };
  const rows = lines.map(({ group, name, jobs, footprint, accounts }) => names.map((key) => cell({ group, name, jobs, ...footprint, baseline_gco2: accounts.baseline_gco2, energy_half_width_j: accounts.half_width?.energy_j, carbon_half_width_gco2: accounts.half_width?.carbon_gco2 }[key])).join());
  const url = URL.createObjectURL(new Blob([[names.join(), ...rows].join("\r\n"), "\r\n"], { type: "text/csv" }));
  h("a", { href: url, download: `wattshift-${asked.group_by}-${(asked.start ?? "all").slice(0, 10)}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
  if (cursor) notice("Only the groups that are shown are in the file; press More for the rest.", "good");
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", () => { limit = PAGE; return trying(show); });
by("more").addEventListener("click", (event) => { limit = Math.min(2 * limit, MOST); return busy(event.target, () => trying(show)); });
by("csv").addEventListener("click", download);
trying(show);
