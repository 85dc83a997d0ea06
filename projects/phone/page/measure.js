// Rounds, statistics as NumPy has them, and the recording that goes to the computer.

const WARM_UPS = 3;
const LEAST_MS = 20; // a turn repeats quick networks, since some browsers' clocks tick in whole ms

/** Give a quantile of values, interpolated linearly. */
export function quantile(values, share) {
  const sorted = Float64Array.from(values).sort();
  const place = (sorted.length - 1) * share;
  const low = Math.floor(place);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

/** Give median and quartiles of times, and the median of their ratios to others, round by round. */
export function summarize(times, first) {
  const [q1, ms, q3] = [0.25, 0.5, 0.75].map((share) => quantile(times, share));
  return { ms, q1, q3, ratio: quantile(times.map((time, round) => time / first[round]), 0.5) };
}

/** Give the largest deviation of outputs, as a share of each output's largest magnitude. */
export function deviation(found, expected) {
  const shares = expected.map((values, index) => {
    const others = found[index] ?? [];
    let [largest, apart] = [1e-30, others.length === values.length ? 0 : Infinity];
    for (let i = 0; i < values.length; i++) {
      largest = Math.max(largest, Math.abs(values[i]));
      apart = Math.max(apart, Math.abs(values[i] - others[i])); // NaN stays
    }
    return apart / largest;
  });
  return Math.max(...shares);
}

/** Give the largest deviation that is good: coarser roundings are ordinary in float16 and int8. */
export const largestDeviation = (engine) => (/float16|int8/.test(engine) ? 1e-2 : 1e-3);

/**
 * Interleave runs (A, B, C, A, B, C, ...) so that noise affects all equally: milliseconds of each,
 * round by round, and none of those that fail. onTurn gets the share that is done; false ends them.
 */
export async function measureInTurn(runs, rounds, onTurn) {
  const times = runs.map(() => []);
  const able = new Set(runs.keys());
  const turns = (WARM_UPS + rounds) * runs.length;
  for (let turn = 0; turn < turns; turn++) {
    const index = turn % runs.length;
    if (!able.has(index)) continue;
    await new Promise((resolve) => setTimeout(resolve)); // the page draws and hears the stop button
    if (!onTurn(turn / turns)) break;
    const start = performance.now();
    let [number, elapsed] = [0, 0];
    while (elapsed < LEAST_MS && able.has(index)) {
      await runs[index]().catch(() => able.delete(index));
      number += 1;
      elapsed = performance.now() - start;
    }
    if (turn >= WARM_UPS * runs.length) times[index].push(elapsed / number);
  }
  const whole = Math.min(...[...able].map((index) => times[index].length));
  return times.map((list, index) => list.slice(0, able.has(index) ? whole : 0));
}

/** Bring measured rows into the form of benchmarks/latency.py's recordings. */
export function toRecording({ shape, npm, files }, device, runs, rows) {
  const short = (value) => (typeof value === 'number' ? Number(value.toPrecision(5)) : value);
  const packages = Object.entries(npm.dependencies).map((pair) => pair.join(' '));
  const builds = rows.map(({ engine, build }) => build && `${engine}: ${build}`);
  const versions = [...new Set([device, ...packages, ...builds])].filter(Boolean);
  const recording = { settings: { shape, runs, threads: 'threads as named' }, versions,
    parameters: {}, delegates: {}, left_out: {}, milliseconds: {}, rows: [] };
  for (const { times, key, run, close, ...row } of rows) {
    recording.parameters[key] = files.find(({ name }) => name === row.file).parameters ?? undefined;
    if (times.length) (recording.milliseconds[row.engine] ??= {})[key] = times.map(short);
    else recording.left_out[`${key}, ${row.engine}`] = row.note || 'not finished';
    const figures = Object.entries(row).map(([name, value]) => [name, short(value)]);
    recording.rows.push(Object.fromEntries(figures));
  }
  return recording;
}
