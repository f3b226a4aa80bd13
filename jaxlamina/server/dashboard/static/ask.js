// Questions to the server, with the API key where it wants one. The key stays in this tab.

import { $ } from "./dom.js";
import { banner, state } from "./head.js";

const ANSWER_MS = 8000;
const KEY = "jaxlamina-key";

export class Locked extends Error {}

/** The answer; `Locked` if the server does not take the key, or wants one. */
export async function ask(path, how = {}, within_ms = ANSWER_MS) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const answer = await fetch(`dashboard/${path}`, {
    headers,
    cache: "no-store",
    signal: AbortSignal.timeout(within_ms),
    ...how,
  });
  if (answer.status !== 401) return answer;
  if (sessionStorage.getItem(KEY) === key) ask_for_key(key !== null); // else another has been given meanwhile
  throw new Locked();
}

export async function words_of(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered with status ${answer.status}`;
  }
}

let unlocked = () => {};

/** `call` once somebody has given a key. */
export function when_unlocked(call) {
  unlocked = call;
}

function ask_for_key(had) {
  sessionStorage.removeItem(KEY);
  $("key-error").hidden = !had;
  $("key-error").textContent = had ? "The server does not take this key." : "";
  $("key-form").hidden = false;
  $("main").hidden = true;
  banner("");
  state("locked", "wait");
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  unlocked();
});

/** What a button asks for; what went wrong is said in `said`. */
export function asks(button, path, said, within_ms, found) {
  $(button).addEventListener("click", async () => {
    const text = $(button).textContent;
    $(button).disabled = true;
    $(button).textContent = "…";
    try {
      const answer = await ask(path, { method: "POST" }, within_ms);
      if (answer.ok) found(await answer.json());
      else $(said).textContent = await words_of(answer);
    } catch (error) {
      if (!(error instanceof Locked)) $(said).textContent = `no answer: ${error.message}`;
    } finally {
      $(button).textContent = text;
      $(button).disabled = false;
    }
  });
}
