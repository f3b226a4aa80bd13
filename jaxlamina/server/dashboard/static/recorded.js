// Recorded steps: which there are, one of them as a Gantt chart, and its numbers.

import { asks } from "./ask.js";
import { $, clock, el, few, legend, stack } from "./dom.js";
import { Gantt, short, slowed, totals } from "./gantt.js";

const KEPT = 12;
const KINDS = [
  ["model", "model"],
  ["attention", "attention"],
  ["exchange", "exchange"],
  ["other", "other"],
  ["bubble", "idle (bubble)"],
];

let recordings = [],
  shown = null,
  follows = true;

const gantt = new Gantt($("gantt"));
legend(
  $("gantt-legend"),
  KINDS.map(([kind, name]) => [`${kind}-kind`, name]),
);

/** The Unix time of the latest recording that is here, 0: none. */
export const recorded_at = () => recordings.at(-1)?.at ?? 0;

/** A state's new recordings, and what it says of recording. */
export function show_pools(found) {
  const fresh = (found.recordings ?? []).filter(({ at }) => at > recorded_at());
  recordings = [...recordings, ...fresh].slice(-KEPT);
  if (fresh.length && follows) choose(recordings.at(-1));
  if (fresh.length) show_recorded(recordings.at(-1));
  const { pools, ranks } = found;
  $("record").hidden = !pools;
  if (pools) $("record").disabled = pools.is_due;
  $("gantt-shown").hidden = $("gantt-tools").hidden = !recordings.length;
  $("gantt-empty").hidden = recordings.length > 0;
  if (!recordings.length) $("gantt-empty").textContent = empty_words(pools, ranks);
  const about = [];
  if (shown) about.push(`recorded at ${clock(shown.at)}, ${few(shown.step_ms)} ms, shown ${slowed(gantt)}`);
  if (pools?.is_due) about.push("the next decode step is recorded");
  $("gantt-about").textContent = about.join("; ");
  $("gantt-error").hidden = !pools?.error;
  $("gantt-error").textContent = `The latest step could not be recorded: ${pools?.error}`;
}

function empty_words(pools, ranks) {
  if (!ranks) return "The server has not been ready yet.";
  if (pools)
    return `One is recorded each ${few(pools.every_s)} s while requests are answered. There is none yet.`;
  if (ranks.length)
    return (
      "No steps are recorded. With serve --pool-metrics-interval 60 one is recorded on all ranks each " +
      "minute, and drawn here."
    );
  return (
    "This server is one process, so there are no pools to compare. Over ranks (jaxlamina launch … -- " +
    "serve --dashboard --pool-metrics-interval 60) each rank's work, exchanges and bubbles are drawn here."
  );
}

function choose(step) {
  shown = step;
  gantt.show(step);
  const kinds = KINDS.filter(([kind]) => step.lanes.some((lane) => totals(step, lane)[kind] > 0));
  const head = el(
    "tr",
    {},
    el("th", { scope: "col" }, "rank"),
    ...kinds.map(([, name]) => el("th", { scope: "col", class: "n" }, name)),
    el("th", { scope: "col", class: "wide" }, "shares"),
  );
  $("lanes").tHead.replaceChildren(head);
  $("lanes").tBodies[0].replaceChildren(
    ...step.lanes.map((lane) => {
      const ms = totals(step, lane);
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, short(lane.name)),
        ...kinds.map(([kind]) => el("td", { class: "n" }, few(ms[kind]))),
        el("td", { class: "wide" }, stack(kinds.map(([kind]) => [`${kind}-kind`, ms[kind] / step.step_ms]))),
      );
    }),
  );
  show_recorded(null);
}

function show_recorded(fresh) {
  $("recorded").replaceChildren(
    ...recordings.toReversed().map((step) => {
      const made = el(
        "button",
        { type: "button", "aria-pressed": String(step === shown) },
        `${clock(step.at)} · ${few(step.step_ms)} ms`,
      );
      for (const pool of ["model", "attention"]) {
        const lanes = step.lanes.filter((lane) => lane.pool === pool).map((lane) => totals(step, lane));
        if (lanes.length)
          made.append(
            stack(
              KINDS.map(([kind]) => [
                `${kind}-kind`,
                lanes.reduce((sum, ms) => sum + ms[kind], 0) / lanes.length / step.step_ms,
              ]),
            ),
          );
      }
      if (step === fresh) made.classList.add("new");
      made.addEventListener("click", () => {
        follows = step === recordings.at(-1);
        choose(step);
      });
      return made;
    }),
  );
}

$("play").textContent = gantt.plays ? "Pause" : "Play";
$("play").addEventListener("click", () => {
  gantt.plays = !gantt.plays;
  $("play").textContent = gantt.plays ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", String(gantt.plays));
});
$("zoom").addEventListener("change", () => {
  gantt.zoom = Number($("zoom").value);
  gantt.draw();
});
/** `call` once the next step is going to be recorded. */
export function when_due(call) {
  asks("record", "record", "gantt-about", 8000, call);
}
