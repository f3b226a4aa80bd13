// What samples say of the time between them. Plain data in and out.

const BREAK_S = 5; // samples that are further apart say nothing of each other

/** Of each sample [its time, `of(later, earlier)`], `earlier` being at least so many seconds older; null
 * where there is none, or where counts have begun anew. */
export function between(samples, over_s, of) {
  const found = [];
  let first = 0;
  samples.forEach((later, i) => {
    if (i && (later.t - samples[i - 1].t > BREAK_S || later.n_steps < samples[i - 1].n_steps)) first = i;
    while (first + 1 < i && later.t - samples[first + 1].t >= over_s) first += 1;
    found.push([later.t, first < i ? of(later, samples[first]) : null]);
  });
  return found;
}

export const rate = (name) => (b, a) => (b[name] - a[name]) / (b.t - a.t);

/** Milliseconds for each of what was counted. */
export const mean_ms = (seconds, count) => (b, a) =>
  b[count] > a[count] ? (1e3 * (b[seconds] - a[seconds])) / (b[count] - a[count]) : null;

export const step_ms = mean_ms("decode_s", "n_decode_steps");
export const token_ms = mean_ms("next_s", "n_next");
export const first_ms = mean_ms("first_s", "n_first");
export const rows = (b, a) =>
  b.n_decode_steps > a.n_decode_steps
    ? (b.n_decode_tokens - a.n_decode_tokens) / (b.n_decode_steps - a.n_decode_steps)
    : null;

/** The latest of `between`, over so many seconds. */
export const latest = (samples, over_s, of) => between(samples, over_s, of).at(-1)?.[1] ?? null;

/** Shares of the time between two samples: decode steps, prompts, and nothing to do. */
export function shares(b, a) {
  const whole = b.t - a.t;
  const decode = (b.decode_s - a.decode_s) / whole,
    prefill = (b.prefill_s - a.prefill_s) / whole;
  // A step's seconds are counted at its end, so a long one may have begun before.
  const scale = Math.max(1, decode + prefill);
  return {
    decode: decode / scale,
    prefill: prefill / scale,
    idle: Math.max(0, 1 - (decode + prefill) / scale),
    launch: Math.min(1, (b.launch_s - a.launch_s) / whole),
    wait: Math.min(1, (b.wait_s - a.wait_s) / whole),
  };
}
