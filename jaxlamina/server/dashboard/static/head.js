// How the server is, in a word and, where it is not well, in a sentence.

import { $, clock, few } from "./dom.js";

export function state(words, kind) {
  $("state").textContent = words;
  $("state").dataset.kind = kind;
}

export function banner(words) {
  $("banner").hidden = !words;
  if ($("banner").textContent !== words) $("banner").textContent = words;
}

export function show_head(found) {
  const { server, supervisor } = found;
  $("age").textContent = `as of ${clock(found.now)}`;
  if (server) $("model").textContent = server.model;
  if (!server) {
    const last = supervisor.recoveries.at(-1);
    const why = last ? ` The last one ended: ${last.reason}.` : "";
    state(supervisor.status === "ready" ? "no answer" : supervisor.status, "wait");
    const words =
      {
        recovering: "The job is being started again. Requests wait, and go on when it is ready.",
        starting: "The job is being started for the first time.",
        ready: "The job has not answered in time.",
        draining: "The server is shutting down.",
        failed: "The job could not be started again; the supervisor has given up.",
      }[supervisor.status] ?? "The job does not answer.";
    return banner(words + why);
  }
  const [n, of] = server.compiled;
  if (server.state === "starting") {
    state("starting", "wait");
    banner(`The model is being compiled: ${n} of ${of} programs before the first request.`);
  } else if (server.state !== "ready") {
    state(server.state, "bad");
    banner(server.reason || "The server is shutting down.");
  } else if (server.paused) {
    state("paused", "wait");
    banner("The engine is paused: requests are accepted, and wait.");
  } else if (found.pools?.is_due && server.in_step_s > 0.5) {
    state("recording", "wait");
    banner(
      "A decode step is being recorded on all ranks: it is run a few times more, and all requests wait.",
    );
  } else if (server.in_step_s > 2) {
    state("in a long step", "wait");
    banner(`The engine has been in one step for ${few(server.in_step_s)} s. Numbers are from before.`);
  } else {
    state("ready", "good");
    banner("");
  }
}
