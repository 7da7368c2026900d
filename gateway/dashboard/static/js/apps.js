// Applications: their mix of variants over time, what it saves, and what runs now.
import { all, get } from "./api.js";
import { Chart, colour, stepped, tinted } from "./charts.js";
import { by, facts, fill, h, table } from "./dom.js";
import { ago, at, badge, carbon, count, digits, energy, figure, percent, unknown, words } from "./format.js";
import { live } from "./live.js";
import { trying } from "./shell.js";

const STEPS = 96;
const INKS = ["accent", "info", "warn", "idle", "bad"];
let apps = [];
let variants = [];

const ms = (value) => (value === null ? unknown() : `${digits(value)} ms`);
const ink = (i) => colour(INKS[i % INKS.length]);

const chart = new Chart(by("mix"), () => ({
  unit: "requests/s", format: (value) => Number(value.toPrecision(3)), right: "intensity",
  scales: { intensity: { range: (_, low, high) => [0, (high ?? 0) > 0 ? high * 1.1 : 1] } },
  series: [...variants.map((name, i) => ({ label: name, stroke: ink(i), fill: tinted(ink(i), 0.55), width: 1, paths: stepped, value: (plot, _, at_, index) => shareAt(plot, i, index) })),
    { label: "intensity", stroke: colour("text"), width: 2, dash: [5, 4], paths: stepped, scale: "intensity", value: (_, value) => (value === null || value === undefined ? "--" : `${Math.round(value)} gCO₂/kWh`) }],
}));

/** The stack is drawn from sums: a variant's own part is what its sum adds to the one below. */
function shareAt(plot, i, index) {
  if (index === null || index === undefined) return "--";
  const below = i + 2 <= variants.length ? plot.data[i + 2][index] ?? 0 : 0;
  return `${digits((plot.data[i + 1][index] ?? 0) - below)} /s`;
}

function showMix(report, stepS) {
  variants = [...new Set(report.mix.flatMap((each) => Object.keys(each.by_variant)))].sort();
  const rows = [[], ...variants.map(() => []), []];
  const push = (time, each) => {
    rows[0].push(time);
    variants.forEach((_, i) => rows[i + 1].push(each ? variants.slice(i).reduce((sum, name) => sum + (each.by_variant[name] ?? 0), 0) / stepS : null));
    rows.at(-1).push(each?.gco2_per_kwh ?? null);
  };
  for (const each of report.mix) push(new Date(each.start_at) / 1000, each);
  if (report.mix.length) push(new Date(report.mix.at(-1).start_at) / 1000 + stepS, report.mix.at(-1));
  chart.plot?.destroy();
  chart.plot = null;
  if (!report.requests) return void fill(by("mix"), h("p", { class: "empty" }, "No request was answered in this period."));
  by("mix").classList.remove("loading");
  by("mix-note").textContent = "Left: requests per second by variant, stacked. Right, dashed: carbon intensity in gCO₂/kWh.";
  chart.show(rows, `Requests per second by variant: ${variants.join(", ")}`);
}

function saving(pct) {
  if (pct === null) return ["Carbon saved", unknown()];
  return pct < 0 ? ["More carbon than that", h("span", { class: "up-is-bad" }, `${digits(-pct)} %`)] : ["Carbon saved", `${digits(pct)} %`];
}

function showFigures(app, report) {
  fill(by("figures"), facts([
    ["Requests", count(report.requests), report.failed ? h("span", { class: "problem sub" }, `${count(report.failed)} failed`) : null],
    ["Per 1,000 requests", figure(report.gco2_per_1000, carbon, { id: "grams-per-1000" }), report.base_gco2_per_1000 === null ? null : h("span", { class: "sub" }, `${carbon(report.base_gco2_per_1000)} with the best variant alone`)],
    saving(report.carbon_saving_pct),
    ["Accuracy", report.accuracy_pct === null ? unknown() : `${digits(report.accuracy_pct)} %`, report.accuracy_loss_pct === null ? null : h("span", { class: "sub" }, `${digits(report.accuracy_loss_pct)} % below the best variant`)],
    ["Latency p95", ms(report.p95_ms), h("span", { class: "sub" }, `limit ${digits(report.sla_p95_ms)} ms`)],
    ["Time within the limit", report.sla_ok_share === null ? unknown() : percent(report.sla_ok_share)],
    ["Energy", figure(report.requests ? report.energy_j : null, energy)], ["Emissions", figure(report.requests ? report.carbon_gco2 : null, carbon)],
    ["Fleet", app.spec.fleet], ["Traffic now", app.traffic.answered ? `${digits(app.traffic.requests_per_s)} requests/s, p95 ` : "none", app.traffic.answered ? ms(app.traffic.p95_ms) : null],
  ]), app.only_proposes ? h("p", { class: "problem" }, `Plans are only proposed: ${app.only_proposes}`) : null);
}

function showRuns(app, instances) {
  fill(by("runs"), app.running.length ? h("p", {}, app.running.map((each) => `${count(each.count)} × ${each.variant} on ${each.slice}`).join(", ")) : null,
    instances.length ? table("Instances", [["Instance"], ["Variant"], ["Slice"], ["State"], ["Where"], ["Since"]], instances.map((each) => h("tr", {},
      h("td", { class: "name" }, each.job_id ? h("a", { href: `/jobs/${each.job_id}` }, each.id) : each.id), h("td", {}, each.variant), h("td", {}, each.slice),
      h("td", {}, badge(each.state), each.detail ? h("small", {}, each.detail) : null), h("td", {}, each.node_id ? `${each.node_id} GPU ${each.gpu ?? "?"}` : unknown()), h("td", { class: "time" }, at(each.ready_at ?? each.created_at, ago)))))
      : h("p", { class: "empty" }, "No instance runs."),
    app.plan ? h("p", { class: "note" }, "Newest plan of the fleet: ", words(app.plan.state), ", ", at(app.plan.made_at, ago), app.plan.detail ? `: ${app.plan.detail}` : ".") : null);
}

async function show() {
  apps = await all("/v1/apps");
  if (!apps.length) {
    by("one").hidden = true;
    return void fill(by("empty"), h("p", { class: "card empty" }, "There is no application. ", h("code", {}, "wattshift apps set NAME FILE"), " makes one."));
  }
  const wanted = by("app").value || new URLSearchParams(location.search).get("app");
  fill(by("app"), apps.map((each) => h("option", { value: each.name, selected: each.name === wanted }, each.name)));
  by("choices").hidden = false;
  by("one").hidden = false;
  fill(by("empty"));
  const app = apps.find((each) => each.name === by("app").value);
  history.replaceState(null, "", `/apps?app=${encodeURIComponent(app.name)}`);
  const hours = Number(by("period").value);
  const stepS = Math.max(60, Math.round((hours * 3600) / STEPS));
  const path = `/v1/apps/${encodeURIComponent(app.name)}`;
  const [report, instances] = await Promise.all([get(`${path}/report`, { hours, step_s: stepS }), get(`${path}/instances`, { limit: 100 })]);
  showFigures(app, report);
  showMix(report, stepS);
  showRuns(app, instances.items.filter((each) => each.ended_at === null));
}

live(["apps", "footprints"], 5_000, show);
for (const id of ["app", "period"]) by(id).addEventListener("change", () => trying(show));
