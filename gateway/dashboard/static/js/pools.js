// Pools of model servers: zones, plan against reality, requests, instances and plans.
import { all, get, stream } from "./api.js";
import { by, facts, fill, h, table } from "./dom.js";
import { ago, at, badge, carbon, clock, count, digits, duration, energy, figure, intensity, percent, unknown, words } from "./format.js";
import { live } from "./live.js";
import { quantile, samples, total } from "./prometheus.js";
import { me, trying } from "./shell.js";

const DAY_MS = 86_400_000;
let pools = [];

const chosen = () => pools.find((each) => each.name === by("pool").value);
const key = (place, mode) => `${place} ${mode}`;

/** Return instances by place and mode, as `counts(instances)` does, of a plan. */
function planned(plan) {
  const found = new Map();
  for (const each of plan?.result?.plan.instances ?? []) {
    const id = key(each.location, each.mode);
    found.set(id, (found.get(id) ?? 0) + each.count);
  }
  return found;
}

function counts(instances) {
  const found = new Map();
  for (const each of instances) {
    const id = key(each.place, each.mode);
    const one = found.get(id) ?? { ready: 0, coming: 0, going: 0 };
    one[each.state === "ready" ? "ready" : each.state === "draining" ? "going" : "coming"] += 1;
    found.set(id, one);
  }
  return found;
}

function showAbout(pool, plan) {
  const result = plan?.result?.plan;
  fill(by("about"), facts([
    ["Plans", words(pool.spec.mode), pool.is_deleted ? h("span", { class: "problem" }, "being deleted") : null],
    ["Instances", Object.entries(pool.instances).filter(([, n]) => n).map(([state, n]) => `${count(n)} ${words(state)}`).join(", ") || "none"],
    ["Current plan", pool.planned_at ? at(pool.planned_at) : unknown(), pool.is_plan_stale ? h("span", { class: "problem" }, "of an earlier interval") : null],
    ["Emissions planned", result?.emissions_kg === null || result === undefined ? unknown() : `${carbon(result.emissions_kg * 1000)} per plan`],
    ["Not served by the plan", result ? (result.shortfall.length ? h("span", { class: "problem" }, result.shortfall.map((each) => `${each.request_class}: ${digits(each.qps)} requests/s (${words(each.reason)})`).join(", ")) : "nothing") : unknown()],
    ["Models", pool.spec.models.join(", ") || pool.name],
  ]));
}

function showZones(pool, plan, instances) {
  const wanted = planned(plan);
  const real = counts(instances);
  const most = Math.max(1, ...wanted.values(), ...[...real.values()].map((each) => each.ready + each.coming));
  fill(by("zones"), pool.spec.places.map((place) => {
    const forecast = plan?.result?.forecasts.intensity[place.name];
    const rows = pool.spec.modes.map((mode) => [mode.name, wanted.get(key(place.name, mode.name)) ?? 0, real.get(key(place.name, mode.name))]).filter(([, n, now]) => n || now);
    return h("div", { class: "zone" }, h("h3", {}, place.name, h("small", {}, ` ${place.zone}`)),
      h("p", {}, h("span", { class: "big" }, forecast ? intensity(forecast.gco2_per_kwh[0]) : unknown()), forecast?.is_stale ? h("span", { class: "problem" }, " stale") : ""),
      rows.length ? rows.map(([mode, n, now]) => h("div", { class: "bar-row" }, h("span", {}, mode),
        bar(n, now?.ready ?? 0, now?.coming ?? 0, most), h("span", { class: "number" }, `${now?.ready ?? 0} of ${n}`)))
        : h("p", { class: "note" }, "Nothing planned, nothing runs."));
  }), h("p", { class: "note wide" }, "Filled: ready. Pale: starting. Outline: planned."));
}

const bar = (plan, ready, coming, most) => h("svg:svg", { class: "plan-bar", viewBox: `0 0 ${most} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `${ready} ready, ${coming} starting, ${plan} planned` },
  h("svg:rect", { width: ready + coming, height: 1, class: "coming" }), h("svg:rect", { width: ready, height: 1, class: "front" }),
  h("svg:rect", { width: plan, height: 1, class: "planned", "vector-effect": "non-scaling-stroke" }));

async function showRequests(pool) {
  const start = new Date(Date.now() - DAY_MS).toISOString();
  const names = new Set(pool.spec.models.length ? pool.spec.models : [pool.name]);
  const [report, text] = await Promise.all([get("/v1/reports/requests", { group_by: "model", start }),
    me.isOperator ? stream("/metrics").then((answer) => answer.text()).catch(() => null) : null]);
  const found = text ? samples(text, "wattshift_router_") : [];
  const lines = report.lines.filter((each) => names.has(each.group));
  const tokens = lines.reduce((sum, each) => sum + each.input_tokens + each.output_tokens, 0);
  const grams = lines.reduce((sum, each) => sum + each.carbon_gco2 + each.outside_carbon_gco2, 0);
  const joules = lines.reduce((sum, each) => sum + each.energy_j + each.outside_energy_j, 0);
  const classes = [...new Set(found.filter((each) => names.has(each.labels.model)).map((each) => `${each.labels.model}\n${each.labels.request_class}`))].filter((each) => !each.endsWith("undefined"));
  const s = (value) => (value === null ? unknown() : duration(value));
  fill(by("latency"), facts([
    ["Requests, last day", count(lines.reduce((sum, each) => sum + each.requests, 0))],
    ["Tokens, last day", count(tokens)],
    ["Carbon per 1,000 tokens", tokens ? figure(grams / tokens * 1000, carbon, { id: "grams-per-1000" }) : unknown()],
    ["Energy per 1,000 tokens", tokens ? energy(joules / tokens * 1000) : unknown()],
  ]), classes.length ? table("Latencies by class", [["Model, class"], ["First token p50", "number"], ["p99", "number"], ["Whole answer p50", "number"], ["p99", "number"], ["In queue p99", "number"], ["Too late", "number"], ["Waiting", "number"]],
    classes.map((each) => {
      const [model, request_class] = each.split("\n");
      const labels = { model, request_class };
      const q = (name, share) => h("td", { class: "number" }, s(quantile(found, `wattshift_router_${name}_seconds`, labels, share)));
      const late = total(found, "wattshift_router_slo_violations_total", labels);
      const answered = total(found, "wattshift_router_e2e_seconds_count", labels);
      return h("tr", {}, h("td", { class: "name" }, model, h("small", {}, request_class)), q("ttft", 0.5), q("ttft", 0.99), q("e2e", 0.5), q("e2e", 0.99), q("queue", 0.99),
        h("td", { class: "number" }, late === null ? (answered ? "0" : unknown()) : `${count(late)}${answered ? ` (${percent(late / answered)})` : ""}`),
        h("td", { class: "number" }, figure(total(found, "wattshift_router_waiting", labels), count)));
    })) : null);
  by("latency-note").textContent = me.isOperator ? (text === null ? "Latencies, violations and queues are unknown: the router's figures cannot be read." : classes.length ? "Latencies since the routers began." : "The routers have answered no request of this pool yet.")
    : "Latencies of the routers are shown to operators.";
}

function showInstances(instances) {
  fill(by("instances"), instances.length ? table("Instances", [["Instance"], ["State"], ["Place, mode"], ["Class"], ["Clock", "number"], ["Reports too late", "number"], ["Since"]], instances.map((each) => h("tr", {},
    h("td", { class: "name" }, each.job_id ? h("a", { href: `/jobs/${each.job_id}` }, each.id) : each.id), h("td", {}, badge(each.state), each.detail ? h("small", {}, each.detail) : null),
    h("td", {}, `${each.place}, ${each.mode}`), h("td", {}, each.request_class ?? "all"),
    h("td", { class: "number" }, each.clock?.clock_mhz ? clock(each.clock.clock_mhz) : unknown(), each.clock?.wanted_mhz ? h("small", {}, `wanted ${clock(each.clock.wanted_mhz)}`) : null),
    h("td", { class: "number" }, each.clock?.exceeded_share === null || !each.clock ? unknown() : percent(each.clock.exceeded_share), each.clock?.unobserved_share ? h("small", {}, `${percent(each.clock.unobserved_share)} without a signal`) : null), h("td", { class: "time" }, at(each.ready_at ?? each.created_at, ago)))))
    : h("p", { class: "empty" }, "No instance runs."));
}

function showPlans(plans) {
  fill(by("plans"), plans.length ? table("Plans, newest first", [["For"], ["Trigger"], ["State"], ["Outcome"], ["Made in", "number"]], plans.map((each) => h("tr", {},
    h("td", { class: "time" }, at(each.from_at)), h("td", {}, words(each.trigger)), h("td", {}, badge(each.state)), h("td", {}, each.outcome ? words(each.outcome) : "not decided", each.failure ? h("small", { class: "problem" }, each.failure.detail) : null),
    h("td", { class: "number" }, figure(each.plan_s, duration))))) : h("p", { class: "empty" }, "No plan yet."));
}

async function show() {
  pools = await all("/v1/pools");
  if (!pools.length) {
    by("one").hidden = true;
    return void fill(by("empty"), h("p", { class: "card empty" }, "There is no pool. ", h("code", {}, "wattshift pools set NAME FILE"), " makes one."));
  }
  const wanted = by("pool").value || new URLSearchParams(location.search).get("pool");
  fill(by("pool"), pools.map((each) => h("option", { value: each.name, selected: each.name === wanted }, each.name)));
  by("pool-choice").hidden = pools.length < 2;
  by("one").hidden = false;
  fill(by("empty"));
  const pool = chosen();
  history.replaceState(null, "", `/pools?pool=${encodeURIComponent(pool.name)}`);
  const path = `/v1/pools/${encodeURIComponent(pool.name)}`;
  const [plan, instances, plans] = await Promise.all([pool.plan_id ? get(`${path}/plans/${pool.plan_id}`).catch(() => null) : null,
    get(`${path}/instances`, { limit: 200, state: [] }), get(`${path}/plans`, { limit: 10 })]);
  const alive = instances.items.filter((each) => each.ended_at === null);
  showAbout(pool, plan);
  showZones(pool, plan, alive);
  showInstances(alive);
  showPlans(plans.items);
  await showRequests(pool);
}

live(["pools"], 5_000, show);
by("pool").addEventListener("change", () => trying(show));
