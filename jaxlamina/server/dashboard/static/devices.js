// What devices did in a second of the load, once a button is pressed.

import { asks } from "./ask.js";
import { $, bar, clock, el, few, legend, percent, whole } from "./dom.js";
import { short } from "./gantt.js";

asks("watch", "watch?seconds=1", "devices-about", 300_000, (found) => {
  $("devices-empty").hidden = true;
  $("devices-about").textContent =
    `${few(found.seconds)} s at ${clock(Date.now() / 1000)}: ${whole(found.n_decode_steps)} decode steps, ` +
    `${whole(found.n_prefill_steps)} prompts or chunks`;
  $("devices-legend").hidden = false;
  legend($("devices-legend"), [
    ["model-kind", "compute"],
    ["exchange-kind", "exchange"],
    ["bubble-kind", "idle"],
  ]);
  $("devices").replaceChildren(
    ...found.ranks.map((rank) =>
      rank.error
        ? bar(short(rank.rank), rank.error, [])
        : bar(
            short(rank.rank),
            `compute ${percent(rank.compute)}, exchange ${percent(rank.exchange)}, ` +
              `idle ${percent(rank.idle)}; ` +
              `longest gap ${few(rank.longest_gap_ms)} ms`,
            [
              ["model-kind", rank.compute],
              ["exchange-kind", rank.exchange],
              ["bubble-kind", rank.idle],
            ],
          ),
    ),
  );
  const lines = found.ranks.flatMap((rank) =>
    (rank.kernels ?? []).map(([name, ms, n]) =>
      el(
        "tr",
        {},
        el("td", {}, short(rank.rank)),
        el("td", { class: "n" }, few(ms)),
        el("td", { class: "n" }, whole(n)),
        el("td", { class: "kernel" }, name),
      ),
    ),
  );
  $("kernels").hidden = !lines.length;
  $("kernels")
    .querySelector("div")
    .replaceChildren(
      el(
        "table",
        { class: "numbers" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ...["rank", "ms", "times", "kernel"].map((name, i) =>
              el("th", { scope: "col", class: i % 3 ? "n" : "" }, name),
            ),
          ),
        ),
        el("tbody", {}, ...lines),
      ),
    );
});
