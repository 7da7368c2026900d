// How far a running job is, and when it ends if it goes on like this.
import { UNKNOWN, at, percent, unknown } from "./format.js";
import { meter } from "./charts.js";
import { h } from "./dom.js";

export const RUNNING = ["running", "starting", "preempting"];

/** Return the part of its work that a job has done; null if that is not known. */
export const shareOf = ({ progress }) => (progress?.total ? Math.min(1, progress.done / progress.total) : null);

/** Return a bar of it. */
export function progressOf(job) {
  const share = shareOf(job);
  return share === null ? h("span", { class: "unknown", title: "It reports no progress." }, UNKNOWN) : [meter(share, 1, `${percent(share)} done`), h("small", {}, percent(share))];
}

/** Return when a running job ends at its pace since it first started, interruptions included. */
export function endOf(job) {
  const share = shareOf(job);
  if (!share || !job.started_at) return unknown();
  const now = Date.now();
  const ran = Math.max(0, new Date(job.progress.updated_at ?? now) - new Date(job.started_at));
  return at(new Date(new Date(job.started_at).getTime() + Math.max(ran / share, now - new Date(job.started_at))).toISOString());
}
