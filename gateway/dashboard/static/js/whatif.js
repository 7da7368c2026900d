// What-if runs: started, followed and compared in place, with the front of carbon against time.
import { get, send } from "./api.js";
import { by, fill, h, table } from "./dom.js";
import { carbon, count, digits, duration, energy, figure, pastDays, percent, relativeChange, unknown } from "./format.js";
import { busy, clear, complain, refused } from "./forms.js";
import { me, notice, trying } from "./shell.js";
import { front, scatter } from "./front.js";

const MOST_VALUES = 6;
const LOOK_MS = 700;
const USUAL = ["fifo", "las", "green", "joint"];

/** Return rows `{label, time, grams, energy, …}` of a finished simulation. */
export function rowsOf(simulation, suffix) {
  const { result } = simulation;
  const each = result?.policies?.map(({ policy, summary }) => ({ ...summary, policy })) ?? [result].flat();
  return each.filter(Boolean).map((found) => ({
    label: `${found.policy}${suffix}`, policy: found.policy, time: found.avg_jct_s, grams: found.carbon_kg === undefined ? null : found.carbon_kg * 1000,
    joules: found.energy_kwh === undefined ? null : found.energy_kwh * 3.6e6, p99: found.p99_jct_s ?? null, preemptions: found.preemptions ?? null,
    completed: found.completed ?? null, jobs: found.jobs ?? null, utilisation: found.utilisation ?? null,
  }));
}

export class WhatIf {
  constructor() {
    this.form = by("what-if");
    this.running = null;
    for (const name of ["source", "vary"]) this.form.elements[name].addEventListener("change", () => this.arrange());
    this.form.addEventListener("submit", (event) => { event.preventDefault(); busy(by("compare"), () => this.compare()); });
    const wanted = new URLSearchParams(location.search).get("jobs");
    if ([...this.form.elements.source.options].some((each) => each.value === wanted)) this.form.elements.source.value = wanted;
    by("stop").addEventListener("click", () => this.stop());
    this.arrange();
  }

  arrange() {
    const source = this.form.elements.source.value;
    by("days-field").hidden = source === "live";
    by("zone-field").hidden = source !== "green-day";
    by("values-field").hidden = !this.form.elements.vary.value;
    if (source === "green-day" && this.form.elements.days.value === "7") this.form.elements.days.value = "1";
  }

  /** Offer policies to compare; the one in force and the usual ones are ticked. */
  offer(list, active) {
    fill(by("compared"), list.map(({ name }) => h("label", { class: "check" }, h("input", { type: "checkbox", name: "policy", value: name, checked: name === active || USUAL.includes(name) }), name)));
    for (const { name, parameters } of list) {
      const found = parameters.filter((each) => ["number", "integer"].includes(each.type));
      if (found.length) this.form.elements.vary.append(h("optgroup", { label: name }, found.map((each) => h("option", { value: `${name}.${each.name}`, title: each.meaning }, each.name))));
    }
  }

  /** Return `[request, suffix]` of each simulation to start; null if the form does not say. */
  requests() {
    clear(this.form);
    const { source, days, grid, vary, values } = this.form.elements;
    const policies = [...this.form.querySelectorAll('[name="policy"]:checked')].map((each) => each.value);
    const base = source.value === "live" ? { jobs: "live", carbon: "live" } : source.value === "history"
      ? { jobs: "history", carbon: me.zone, ...pastDays(Number(days.value), Date.now()) }
      : { jobs: "green-day", carbon: grid.value, days: Number(days.value) };
    const asked = policies.length ? [[{ ...base, policy: policies }, ""]] : [];
    if (vary.value) {
      const given = values.value.trim().split(/[\s,]+/).filter(Boolean).map(Number);
      if (!given.length || given.length > MOST_VALUES || given.some(Number.isNaN)) return void complain(values, `Give one to ${MOST_VALUES} numbers.`);
      const [policy, ...name] = vary.value.split(".");
      for (const value of given) asked.push([{ ...base, policy: [policy], params: { [name.join(".")]: value } }, ` ${name.join(".")}=${value}`]);
    }
    if (!asked.length) return void notice("Choose a policy, or a parameter to vary.");
    return asked;
  }

  async compare() {
    const asked = this.requests();
    if (!asked) return;
    const run = this.running = { started: [], stopped: false };
    fill(by("results"), h("p", { class: "note" }, "Starting…"));
    by("stop").hidden = false;
    try {
      await follow(run, asked, by("results"));
      this.show(run);
    } catch (error) {
      refused(this.form, error, () => null);
      fill(by("results"));
    } finally {
      by("stop").hidden = true;
    }
  }

  async stop() {
    const run = this.running;
    run.stopped = true;
    for (const { work } of run.started) if (!ended(work)) await trying(() => send("DELETE", `/v1/simulations/${work.id}`));
  }

  show(run) {
    const failed = run.started.filter(({ work }) => work.status === "failed");
    const rows = run.started.filter(({ work }) => work.status === "succeeded").flatMap(({ work, suffix }) => rowsOf(work, suffix));
    const known = rows.filter((row) => row.time !== null && row.time !== undefined && row.grams !== null);
    const best = front(known);
    const least = known.length ? Math.min(...known.map((row) => row.grams)) : 0;
    const [grams, joules] = [carbon.of(rows.map((row) => row.grams)), energy.of(rows.map((row) => row.joules))];
    const above = (row) => relativeChange(row.grams, least);
    const columns = [["Policy"], ["Carbon", "number"], ["Above the least", "number"], ["Energy", "number"], ["Mean time to end", "number"], ["99th percentile", "number"], ["Preemptions", "number"], ["Ended", "number"]];
    fill(by("results"),
      failed.map(({ work, suffix }) => h("p", { class: "problem" }, `${work.policies.join(", ")}${suffix}: ${work.failure?.detail ?? "failed"}`)),
      run.stopped ? h("p", { class: "note" }, "Stopped.") : null,
      known.length > 1 ? h("figure", { class: "front" }, scatter(known, best), h("figcaption", { class: "note" }, "Carbon against the mean time from submission to end, waiting included. Filled points are on the front: none of the others is better in both.")) : null,
      rows.length ? table("Policies compared", columns, rows.toSorted((a, b) => (a.grams ?? 0) - (b.grams ?? 0)).map((row) => h("tr", {},
        h("td", { class: "name" }, row.label, best.includes(row) ? h("small", {}, "on the front") : null),
        h("td", { class: "number" }, figure(row.grams, grams)), h("td", { class: "number" }, above(row) === null ? unknown() : percent(above(row))),
        h("td", { class: "number" }, figure(row.joules, joules)), h("td", { class: "number" }, figure(row.time, duration)), h("td", { class: "number" }, figure(row.p99, duration)),
        h("td", { class: "number" }, figure(row.preemptions, count)), h("td", { class: "number" }, row.completed === null ? unknown() : `${digits(row.completed)} of ${digits(row.jobs)}`)))) : null);
  }
}

/** Start simulations, each `[request, suffix]`, and show how far they are until all have ended or `run.stopped`; one refused ends all. */
export async function follow(run, asked, place) {
  try {
    for (const [request, suffix] of asked) run.started.push({ work: await send("POST", "/v1/simulations", request), suffix });
    while (!run.stopped && run.started.some(({ work }) => !ended(work))) {
      const sum = (name) => run.started.reduce((total, { work }) => total + work.progress[name], 0);
      fill(place, h("label", { class: "note" }, `Simulated ${count(sum("done"))} of ${count(sum("total"))} jobs `, h("progress", { max: sum("total") || 1, value: sum("done") })));
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
      for (const each of run.started) if (!ended(each.work)) each.work = await get(`/v1/simulations/${each.work.id}`);
    }
  } catch (error) {
    for (const { work } of run.started) if (!ended(work)) trying(() => send("DELETE", `/v1/simulations/${work.id}`));
    throw error;
  }
}

const ended = (work) => ["succeeded", "failed", "cancelled"].includes(work.status);
