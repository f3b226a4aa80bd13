// Asks the server once a second while the page is seen, and shows what it says.

import { Locked, ask, when_unlocked, words_of } from "./ask.js";
import { Chart } from "./charts.js";
import "./devices.js";
import { $, bar, clock, duration, el, few, legend, percent, stack, whole } from "./dom.js";
import { banner, show_head, state } from "./head.js";
import { between, first_ms, latest, mean_ms, rate, rows, shares, step_ms, token_ms } from "./numbers.js";
import { recorded_at, show_pools, when_due } from "./recorded.js";

const EACH_MS = 1000,
  SMOOTH_S = 3,
  NOW_S = 5,
  TIME_S = 10,
  KEPT = 1500;

let samples = [],
  answered = 0,
  timer = 0;

// --- asking ---

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const answer = await ask(`state?after=${samples.at(-1)?.t ?? 0}&recorded_after=${recorded_at()}`);
    if (!answer.ok) throw new Error(await words_of(answer));
    take(await answer.json());
  } catch (error) {
    if (error instanceof Locked) return;
    const since = answered ? ` since ${clock(answered)}` : "";
    const why = error.name === "TimeoutError" ? "no answer in time" : error.message;
    state("no answer", "bad");
    banner(`The server has not answered${since} (${why}). Trying again each second.`);
    if (answered) $("main").hidden = false;
  }
  timer = setTimeout(poll, EACH_MS);
}

when_unlocked(poll);
when_due(poll);
document.addEventListener("visibilitychange", poll);

// --- numbers ---

const tiles = {};

function tile(id, name, value, unit, under) {
  if (!tiles[id]) {
    const parts = {
      value: el("span"),
      unit: el("span", { class: "unit" }),
      under: el("p", { class: "under" }),
    };
    parts.tile = el(
      "section",
      { class: "tile", id: `tile-${id}` },
      el("h2", {}, name),
      el("p", { class: "value" }, parts.value, " ", parts.unit),
      parts.under,
    );
    $("tiles").append(parts.tile);
    tiles[id] = parts;
  }
  const { value: v, unit: u, under: w } = tiles[id];
  [v.textContent, u.textContent, w.textContent] = [value, unit, under];
}

const charts = {
  tokens: new Chart($("charts"), {
    title: "Throughput",
    unit: "tokens/s",
    least: 10,
    series: [
      { name: "written", kind: "a" },
      { name: "prompts", kind: "b" },
    ],
  }),
  requests: new Chart($("charts"), {
    title: "Requests",
    unit: "",
    least: 4,
    words: whole,
    series: [
      { name: "running", kind: "a" },
      { name: "waiting", kind: "b" },
    ],
  }),
  token: new Chart($("charts"), {
    title: "Time per output token",
    unit: "ms, mean",
    series: [{ name: "measured", kind: "a" }],
  }),
  step: new Chart($("charts"), {
    title: "Decode step",
    unit: "ms, mean",
    series: [
      { name: "measured", kind: "a" },
      { name: "predicted", kind: "b", optional: true },
    ],
  }),
};

function show_numbers(found) {
  const last = samples.at(-1),
    now = found.now;
  if (!last) return;
  const recent = samples.slice(-60);
  const tokens = latest(recent, NOW_S, rate("n_generated_tokens"));
  tile(
    "tokens",
    "Throughput",
    tokens === null ? "–" : whole(tokens),
    "tokens/s",
    `${few(latest(recent, NOW_S, rate("n_prompt_tokens")))} prompt tokens/s`,
  );
  tile("requests", "Requests running", whole(last.n_running), "", `${whole(last.n_waiting)} waiting`);
  tile(
    "token",
    "Time per output token",
    few(latest(recent, NOW_S, token_ms)),
    "ms",
    `first token ${duration(latest(recent, 30, first_ms))}`,
  );
  const predicted = last.predicted_step_ms === null ? "" : `, predicted ${few(last.predicted_step_ms)} ms`;
  tile(
    "step",
    "Decode step",
    few(latest(recent, NOW_S, step_ms)),
    "ms",
    `${few(latest(recent, NOW_S, rows))} sequences each${predicted}`,
  );
  tile(
    "kv",
    "KV slots used",
    few((100 * last.kv_slots_used) / last.kv_slots),
    "%",
    `${whole(last.kv_slots_used)} of ${whole(last.kv_slots)}`,
  );
  const bubbles = found.pools?.bubble_shares;
  if (bubbles && Object.keys(bubbles).length)
    tile(
      "bubbles",
      "Idle in a step (bubble)",
      Object.values(bubbles)
        .map((share) => whole(100 * share))
        .join(" / "),
      "%",
      `${Object.keys(bubbles).join(" / ")} pool`,
    );
  else tile("preemptions", "Preemptions", whole(last.n_preemptions), "", "since the start");
  if (bubbles && Object.keys(bubbles).length && tiles.preemptions) tiles.preemptions.tile.hidden = true;

  charts.tokens.show(
    ["n_generated_tokens", "n_prompt_tokens"].map((name) => between(samples, SMOOTH_S, rate(name))),
    now,
  );
  charts.requests.show(
    ["n_running", "n_waiting"].map((name) => samples.map((s) => [s.t, s[name]])),
    now,
  );
  charts.token.show([between(samples, SMOOTH_S, mean_ms("next_s", "n_next"))], now);
  charts.step.show(
    [between(samples, SMOOTH_S, step_ms), samples.map((s) => [s.t, s.predicted_step_ms])],
    now,
  );
  show_kv(found, last);
  show_time(recent);
}

function show_kv(found, last) {
  const made = [];
  const used = last.kv_slots_used / last.kv_slots,
    cached = last.kv_slots_cached / last.kv_slots;
  made.push(
    bar(
      "all",
      `${whole(last.kv_slots_used)} used, ${whole(last.kv_slots_cached)} cached, ` +
        `${whole(last.kv_slots - last.kv_slots_used - last.kv_slots_cached)} free`,
      [
        ["used-kind", used],
        ["cached-kind", cached],
      ],
    ),
  );
  const held = found.kv ?? [],
    n_of = { model: 0, attention: 0 };
  if (held.length > 1)
    for (const { pool, n_used, n_slots } of held) {
      const name = `${pool} worker${pool === "attention" || n_of.model ? ` ${n_of[pool]}` : "s"}`;
      n_of[pool] += 1;
      if (n_used === null)
        made.push(
          bar(name, "all tokens, of its heads", [
            ["used-kind", used],
            ["cached-kind", cached],
          ]),
        );
      else
        made.push(
          bar(name, `${whole(n_used)} held, cached ones with them, ${whole(n_slots - n_used)} free`, [
            ["used-kind", n_used / n_slots],
          ]),
        );
    }
  for (const [name, title] of [
    ["host_kv_slots", "host memory"],
    ["kept_kv_slots", "kept by content"],
  ])
    if (last[name])
      made.push(
        bar(title, `${whole(last[`${name}_used`])} of ${whole(last[name])}`, [
          ["used-kind", last[`${name}_used`] / last[name]],
        ]),
      );
  $("kv").replaceChildren(...made);
  legend($("kv-legend"), [
    ["used-kind", "used"],
    ["cached-kind", "cached prefixes"],
    ["free-kind", "free"],
  ]);
  const local = held.some(({ pool }) => pool === "attention") && held.some(({ pool }) => pool === "model");
  $("kv-about").textContent = local ? `${percent(last.local_share)} of attended tokens on model workers` : "";
}

function show_time(recent) {
  const found = latest(recent, TIME_S, shares);
  legend($("time-legend"), [
    ["decode-kind", "decode steps"],
    ["prompts-kind", "prompts"],
    ["launch-kind", "launching"],
    ["bubble-kind", "waiting"],
    ["free-kind", "nothing to do"],
  ]);
  if (found === null) return $("time").replaceChildren();
  const { decode, prefill, idle, launch, wait } = found;
  $("time").replaceChildren(
    bar("steps", `decode ${percent(decode)}, prompts ${percent(prefill)}, none ${percent(idle)}`, [
      ["decode-kind", decode],
      ["prompts-kind", prefill],
    ]),
    bar("host", `launching ${percent(launch)}, waiting for results ${percent(wait)}`, [
      ["launch-kind", launch],
      ["bubble-kind", wait],
    ]),
  );
}

function show_requests(found) {
  if (!found.requests) return;
  const { running, waiting } = found.requests,
    last = samples.at(-1);
  const all = [...running.map((r) => [r, true]), ...waiting.map((r) => [r, false])];
  $("requests-empty").hidden = all.length > 0;
  $("requests").hidden = !all.length;
  $("requests-about").textContent =
    last && last.n_running + last.n_waiting > all.length
      ? `the first ${all.length} of ${whole(last.n_running + last.n_waiting)}`
      : "";
  $("requests").tBodies[0].replaceChildren(
    ...all.map(([r, runs]) => {
      const is = !runs ? "waiting" : r.n_computed === null ? "writing" : "reading its prompt";
      const again = r.n_preemptions ? `, preempted ${r.n_preemptions} ×` : "";
      const share = runs && r.n_computed !== null ? 0 : r.n_written / r.max_tokens;
      return el(
        "tr",
        {},
        el("td", {}, r.index ? `${r.id}, ${r.index}` : r.id),
        el("td", {}, is + again),
        el("td", { class: "n" }, whole(r.n_prompt)),
        el("td", { class: "n" }, whole(r.n_written)),
        el("td", { class: "n" }, whole(r.max_tokens)),
        el("td", { class: "wide" }, stack([["used-kind", share]])),
      );
    }),
  );
}

// --- the supervisor ---

function show_supervisor(supervisor) {
  $("supervisor").hidden = !supervisor;
  if (!supervisor) return;
  const n = supervisor.recoveries.length;
  $("supervisor-about").textContent =
    `job: ${supervisor.job}; started ${whole(supervisor.starts)} ×; spare: ${supervisor.spare}; ` +
    `last start took ${few(supervisor.last_start_seconds)} s`;
  $("supervisor-empty").hidden = n > 0;
  $("recoveries").hidden = !n;
  $("recoveries").tBodies[0].replaceChildren(
    ...supervisor.recoveries
      .slice(-8)
      .toReversed()
      .map(({ cause, reason }) => el("tr", {}, el("td", {}, cause), el("td", { class: "wide" }, reason))),
  );
}

// --- all of it ---

function take(found) {
  answered = found.now;
  $("key-form").hidden = true;
  $("main").hidden = false;
  const last = samples.at(-1)?.t ?? 0;
  samples = [...samples, ...(found.samples ?? []).filter(({ t }) => t > last)].slice(-KEPT);
  show_head(found);
  show_numbers(found);
  show_requests(found);
  show_pools(found);
  show_supervisor(found.supervisor);
}

poll();
