// One job: its state, why, its life against the grid, its footprint and its output.
import { get, send, stream } from "./api.js";
import { by, facts, fill, h, table } from "./dom.js";
import { ago, at, badge, carbon, count, counted, duration, energy, figure, gpuHours, intensity, numberOf, percent, power, startsNow, unknown, within, words, clock } from "./format.js";
import { Chart, colour, faded, stepped } from "./charts.js";
import { LifeLine } from "./life.js";
import { follow, throttled, every } from "./live.js";
import { Output } from "./output.js";
import { busy } from "./forms.js";
import { confirmed, me, trying } from "./shell.js";

const id = location.pathname.split("/").at(-1);
const path = `/v1/jobs/${encodeURIComponent(id)}`;
const life = new LifeLine(by("life"), by("life-legend"), by("life-note"));
const usedChart = new Chart(by("used"), () => ({
  unit: "W", format: (value) => Math.round(value), legend: false, x: { range: () => life.range }, right: "wh", scales: { wh: { range: (_, low, high) => [0, (high ?? 0) > 0 ? high * 1.1 : 1] } },
  series: [
    { label: "power", stroke: colour("accent"), width: 2, fill: faded(colour("accent"), 0.12), paths: stepped },
    { label: "energy", stroke: colour("info"), width: 2, dash: [6, 4], scale: "wh" },
  ],
}));
const output = new Output(path, by("log"), by("log-note"), by("tail"));
const LINES = 100;
const events = [];
const change = h("div", { "aria-live": "polite" }); // the last answer, kept while what is around it is filled anew
let job = null;

const ended = () => job.ended_at !== null;
const holdsGpus = () => ["starting", "running", "preempting"].includes(job.state);

function showActions() {
  if (!me.mayChange || ended()) return fill(by("actions"));
  const act = (name, text, kind, question) => h("button", { type: "button", class: kind, "data-focus": name, onclick: async () => {
    if (question && !(await confirmed(question, text))) return;
    const done = await trying(() => send("POST", `${path}/${name}`));
    if (done) { job = done; showJob(); }
  } }, text);
  const held = job.state === "held";
  return fill(by("actions"),
    held ? act("release", "Release", "primary") : act("hold", "Hold", "", holdsGpus() ? `Stop ${job.name} and hold it? It keeps its checkpoints.` : null),
    act("cancel", "Cancel job", "danger", `Cancel ${job.name}? This cannot be undone.`));
}

function placement() {
  if (!job.placement.length) return job.gpus ? count(job.gpus) : "none now";
  return job.placement.map((share, i) => [i ? ", " : "", me.isOperator ? h("a", { href: `/nodes#${share.node_id}` }, share.node_id) : share.node_id,
    ` GPU ${share.devices.join(", ")}`]);
}

function progress() {
  if (!job.progress) return unknown();
  const { done, total, unit } = job.progress;
  return total ? `${percent(done / total)}: ${count(done)} of ${count(total)} ${unit ?? ""}` : `${count(done)} ${unit ?? ""}`;
}

function showJob() {
  document.title = `${job.name} · Wattshift`;
  fill(by("name"), job.name);
  showActions();
  const waits = job.state === "queued";
  const wanted = job.spec.gpus;
  fill(by("summary"), facts([
    ["State", badge(job.state, waits ? "waiting" : words(job.state))],
    [ended() ? "How it ended" : waits ? "Why it waits" : "Now", h("span", { id: "reason" }, job.detail ?? (words(job.reason) || "not known yet"))],
    waits ? ["Expected start", h("span", { id: "expected" }, job.expected_start_at ? at(job.expected_start_at) : unknown())] : null,
    ["Submitted", at(job.submitted_at), h("span", { class: "sub" }, ago(job.submitted_at))],
    job.started_at ? ["First start", at(job.started_at), h("span", { class: "sub" }, `waited ${duration((new Date(job.started_at) - new Date(job.submitted_at)) / 1000)}`)] : null,
    job.stop_at ? ["Killed", h("span", { id: "stop-at" }, at(job.stop_at)), h("span", { class: "sub" }, "if it has not ended by then")] : null,
    ended() ? ["Ended", at(job.ended_at), job.exit_code !== null ? h("span", { class: "sub" }, `exit code ${job.exit_code}`) : null] : null,
    ["GPUs", ended() ? (wanted.max && wanted.max !== wanted.min ? `${wanted.min}–${wanted.max} asked for` : `${wanted.min} asked for`) : placement()],
    holdsGpus() ? ["Power limit, clock", `${job.power_limit_w === null ? "default" : power(job.power_limit_w)}, ${job.clock_mhz === null ? "default" : clock(job.clock_mhz)}`] : null,
    job.started_at ? ["Progress", progress()] : null,
    ["Project", job.project, h("span", { class: "sub" }, [me.isOperator ? job.tenant_id : null, job.user].filter(Boolean).join(" · "))],
    job.preemptions || job.restarts ? ["Interruptions", `${counted(job.preemptions, "preemption")}, ${counted(job.restarts, "restart")}`] : null,
    ["Number", numberOf(job) ?? "–", h("span", { class: "sub" }, h("code", {}, job.id))],
  ]), job.warnings.map((text) => h("p", { class: "problem" }, text)));
  fill(by("spec"), JSON.stringify(job.spec, (_, value) => (value === null ? undefined : value), 2));
  output.follow(job);
}

async function showFootprint() {
  const report = await get(`${path}/footprint`, { limit: 500 });
  const { footprint: used } = report;
  const started = job.started_at !== null;
  fill(by("footprint"), facts([
    ["Energy", started ? figure(used.energy_j, energy, { id: "job-energy" }) : "none yet", within(report.half_width?.energy_j, used.energy_j)],
    ["Emissions", started ? figure(used.carbon_gco2, carbon, { id: "job-carbon" }) : "none yet", within(report.half_width?.carbon_gco2, used.carbon_gco2)],
    ["GPU time", figure(used.gpu_s, gpuHours)],
    ["Of it estimated", started && used.energy_j ? percent(used.estimated_energy_j / used.energy_j) : "–"],
    ["Zone, signal", report.zone ? `${report.zone}, ${words(report.signal)}` : unknown()],
    ["PUE", report.pue === null ? unknown() : report.pue.toFixed(2)],
  ]));
  return report;
}

let most = LINES;

/** Return the first lines that the ledger has of the job, and whether there are more; the rest is not read. */
async function readLines() {
  const reading = new AbortController();
  const reader = (await stream("/v1/reports/lines", { job: id, format: "jsonl" }, { signal: reading.signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  const lines = [];
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    const found = (rest + (value ?? "")).split("\n");
    rest = found.pop();
    lines.push(...found.map((line) => JSON.parse(line)));
    if (!done && lines.length <= most) continue;
    reading.abort();
    return [lines.slice(0, most), lines.length > most];
  }
}

/** Show the lines whose sums are the job's footprint, once somebody looks. */
async function showLines() {
  if (!by("lines").open) return;
  const [lines, more] = await readLines();
  const [joules, grams] = [energy.of(lines.map((each) => each.energy_j)), carbon.of(lines.map((each) => each.carbon_gco2))];
  fill(by("ledger"), lines.length ? table("Lines of the ledger", [["From"], ["Until"], ["Node"], ["GPUs"], ["Energy", "number"], ["Measured by"], ["Intensity", "number"], ["It was"], ["Carbon", "number"]], lines.map((each) => h("tr", {},
    h("td", { class: "time" }, at(each.start_at)), h("td", { class: "time" }, at(each.end_at)), h("td", {}, me.isOperator ? h("a", { href: `/nodes#${encodeURIComponent(each.node_id)}` }, each.node_id) : each.node_id), h("td", {}, each.devices ?? unknown()),
    h("td", { class: "number" }, figure(each.energy_j, joules)), h("td", {}, each.gpu_source ? words(each.gpu_source) : unknown()), h("td", { class: "number" }, figure(each.intensity_gco2_per_kwh, intensity)),
    h("td", {}, each.intensity_kind ? words(each.intensity_kind) : unknown()), h("td", { class: "number" }, figure(each.carbon_gco2, grams))))) : h("p", { class: "empty" }, "The ledger has no line of it yet."));
  fill(by("ledger-note"), more ? `The first ${count(lines.length)} lines.` : `${counted(lines.length, "line")}, all of them.`, " With every column: ", h("a", { href: `/v1/reports/lines?job=${encodeURIComponent(id)}`, download: `wattshift-lines-${id}.csv` }, "CSV"), ".");
  by("more-lines").hidden = !more;
}

/** Draw the power and the energy so far of what a job used, in gaps where it held nothing. */
function drawUsed(intervals) {
  by("used").hidden = by("used-note").hidden = !intervals.length || !life.range;
  if (by("used").hidden) return;
  const rows = [[], [], []];
  let [end, sum] = [null, 0];
  const push = (s, watts) => [s, watts, sum / 3600].forEach((value, i) => rows[i].push(value));
  for (const each of intervals) {
    const [from, to] = [new Date(each.start_at) / 1000, new Date(each.end_at) / 1000];
    if (end !== null && from > end + 1) push(end, null);
    push(from, each.energy_j / Math.max(to - from, 1e-3));
    sum += each.energy_j;
    end = to;
  }
  push(end, rows[1].at(-1));
  usedChart.show(rows, `Power of the job over its life, ${energy(sum)} so far`);
}

function emission(text, estimate) {
  if (!estimate) return null;
  const grams = estimate.carbon_gco2 ?? estimate.carbon_gco2_per_hour;
  return [text, at(estimate.starts_at), `: ${intensity(estimate.intensity_gco2_per_kwh)}`,
    h("span", { class: "sub" }, grams === null ? ["emissions ", unknown()] : `${carbon(grams)}${estimate.carbon_gco2 === null ? " an hour" : ""}`)];
}

/** Ask which one change would start a waiting job: the queue is replayed for it, so only when somebody wants to know. */
async function showChange(button) {
  const why = await busy(button, () => trying(() => get(`${path}/explain`, { one_change: true })));
  if (why) fill(change, h("p", {}, why.waiting?.one_change?.detail ?? "No one change is known with which it would start now or earlier."), h("p", { class: "note" }, "By the queue of ", at(new Date().toISOString()), ". The job itself is not changed."));
}

async function showWhy() {
  const why = await get(`${path}/explain`);
  const { waiting, running, ended: over } = why;
  const mayChange = waiting?.place && !waiting.starts_now;
  if (!mayChange) fill(change);
  const length = (waiting ?? running)?.length;
  fill(by("why"), h("p", {}, why.summary), facts([
    waiting?.place?.position ? ["Place in the queue", `${count(waiting.place.position)} of ${count(waiting.place.waiting_jobs)}`] : null,
    waiting ? ["Suitable GPUs", `${count(waiting.gpus.free)} free of ${count(waiting.gpus.suitable)}`] : null,
    waiting ? emission("If started ", waiting.now) : null,
    waiting ? (startsNow(waiting) ? ["Greenest", "it is now"] : emission("Greenest ", waiting.greenest)) : null,
    running?.next ? ["Next round", running.next.action === "stop" ? `would stop it${running.next.gpus ? ` and restart it on ${counted(running.next.gpus, "GPU")}` : ""}` : why.summary.includes(running.next.detail) ? "it runs on" : running.next.detail, running.next.at ? h("span", { class: "sub" }, at(running.next.at)) : null] : null,
    running ? ["Expected end", running.expected_end_at ? at(running.expected_end_at) : unknown()] : null,
    length?.seconds ? ["Still runs", duration(length.seconds), h("span", { class: "sub" }, `by its ${words(length.source)}`)] : null,
    over ? ["Waited", duration(over.waited_s)] : null, over ? ["Held GPUs", duration(over.held_gpus_s)] : null,
    why.baseline_gco2 !== null ? ["At the mean intensity", carbon(why.baseline_gco2)] : null,
  ].filter((each) => each)), mayChange ? h("div", { class: "buttons" }, h("button", { type: "button", "data-focus": "change", onclick: (event) => showChange(event.currentTarget) }, "What would start it now or earlier?")) : null, mayChange ? change : null,
  running?.why.length ? h("ul", { class: "small" }, running.why.map((line) => h("li", {}, line))) : null,
  why.levers.length ? h("details", {}, h("summary", {}, "What each lever of the policy does for it"), table("Levers", [["Lever"], ["Carbon saved", "number"], ["Later by", "number"], ["Against"]],
    why.levers.map((each) => h("tr", {}, h("td", {}, words(each.lever)), h("td", { class: "number" }, figure(each.carbon_saved_gco2, carbon.of(why.levers.map((lever) => lever.carbon_saved_gco2)))),
      h("td", { class: "number" }, each.minutes_added === null ? unknown() : duration(each.minutes_added * 60)), h("td", { class: "why" }, each.detail))))) : null,
  h("details", {}, h("summary", {}, "Its story"), h("ol", { class: "feed" }, why.story.map((line) => h("li", {}, at(line.at), h("span", {}, line.text))))));
  showOthers(why.under_policies);
  return why;
}

function showOthers(others) {
  by("others").hidden = !others;
  if (!others) return;
  if (others.status !== "ready") return void fill(by("policies"), h("p", { class: "note" }, others.detail ?? words(others.status)));
  const ours = others.items.find((each) => each.in_force);
  by("others").hidden = !ours || Boolean(ours.failure);
  if (by("others").hidden) return;
  const rest = others.items.filter((each) => !each.in_force && !each.failure && each.ends_at && each.carbon_gco2 !== null).sort((a, b) => a.carbon_gco2 - b.carbon_gco2);
  const compared = [...new Set([rest.find((each) => each.policy === "fifo"), rest[0]])].filter(Boolean);
  const later = (each) => (new Date(each.ends_at) - new Date(ours.ends_at)) / 1000;
  const change = (value, show, more, less) => (value === null ? unknown() : Math.abs(value) < 1e-9 ? "the same" : `${show(Math.abs(value))} ${value > 0 ? more : less}`);
  fill(by("policies"), compared.length ? table("The job under two other policies, against the one in force", [["Policy"], ["Would end"], ["Carbon", "number"]],
    compared.map((each) => h("tr", {}, h("td", {}, each.policy, each === rest[0] ? h("small", {}, "least carbon of all") : null),
      h("td", { class: "time" }, change(ours.ends_at ? later(each) : null, duration, "later", "earlier")),
      h("td", { class: "number" }, change(ours.carbon_gco2 === null ? null : each.carbon_gco2 - ours.carbon_gco2, carbon, "more", "less"))))) : h("p", { class: "note" }, "No other policy could be simulated."),
  h("p", { class: "note" }, [`Against ${ours.policy}, which is in force. Simulated from the queue of `, at(others.as_of), " as if no further job were submitted. ", h("details", {}, h("summary", {}, "What it rests on"), others.assumptions.join(" "))]));
}

async function showAll() {
  job = await get(path);
  showJob();
  const [used, why] = await Promise.all([trying(showFootprint), trying(showWhy)]);
  await trying(() => life.show(job, events, used?.zone ?? me.zone, why?.running?.expected_end_at ?? null));
  drawUsed(used?.intervals ?? []);
}

const refresh = throttled(() => trying(showAll), 1000);
(async () => {
  try {
    await showAll();
  } catch (error) {
    fill(by("summary"), h("p", { class: "problem" }, error.status === 404 ? "There is no such job, or your key may not see it." : error.message));
    for (const each of document.querySelectorAll("main section, main details")) each.hidden = true;
    return;
  }
  const seen = new Set();
  const stop = follow(`${path}/events`, (event) => {
    if (seen.has(event.id)) return;
    seen.add(event.id);
    events.push(event);
    refresh();
    if (["job.succeeded", "job.failed", "job.cancelled"].includes(event.type)) stop();
  });
  every(15_000, () => (ended() ? null : trying(showAll)));
})();
by("lines").addEventListener("toggle", () => trying(showLines));
by("lines").open = location.hash === "#lines";
by("more-lines").addEventListener("click", (event) => { most *= 4; return busy(event.target, () => trying(showLines)); });
by("stream").addEventListener("change", (event) => output.choose(event.target.value));
