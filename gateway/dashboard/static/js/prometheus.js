// Figures of processes in Prometheus' text format, as far as a page needs them.

/** Return the samples whose names begin with `prefix`, as `{name, labels, value}`. */
export function samples(text, prefix) {
  const found = [];
  for (const line of text.split("\n")) {
    if (!line.startsWith(prefix)) continue;
    const match = /^(\w+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

/** Return the sum of the samples of this name that have these labels; null where there are none. */
export function total(found, name, labels = {}) {
  const chosen = found.filter((each) => each.name === name && Object.entries(labels).every(([key, value]) => each.labels[key] === value));
  return chosen.length ? chosen.reduce((sum, each) => sum + each.value, 0) : null;
}

/** Return a quantile of a histogram, interpolated in its bucket as Prometheus does; null without observations. */
export function quantile(found, name, labels, share) {
  const buckets = new Map();
  for (const each of found) {
    if (each.name !== `${name}_bucket` || !Object.entries(labels).every(([key, value]) => each.labels[key] === value)) continue;
    const bound = each.labels.le === "+Inf" ? Infinity : Number(each.labels.le);
    buckets.set(bound, (buckets.get(bound) ?? 0) + each.value);
  }
  const sorted = [...buckets].sort((a, b) => a[0] - b[0]);
  const all = sorted.at(-1)?.[1] ?? 0;
  if (!all) return null;
  let [before, below] = [0, 0];
  for (const [bound, upTo] of sorted) {
    if (upTo >= share * all) return bound === Infinity ? before : before + (bound - before) * ((share * all - below) / (upTo - below));
    [before, below] = [bound, upTo];
  }
  return null;
}
