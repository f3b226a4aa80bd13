// A recorded step as a Gantt chart in slow motion: a lane per rank, and a line that moves over them.

import { few } from "./dom.js";

const BAR = 26,
  GAP = 12,
  AXIS = 24,
  NAMES = 176,
  NARROW = 640;
const SECONDS = 8; // in which the line crosses what is seen
const WORK = { model: "slice", attention: "attention" };

export class Gantt {
  constructor(canvas) {
    this.canvas = canvas;
    this.step = null;
    this.at_us = 0;
    this.zoom = 1;
    this.plays = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.last = null;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("pointermove", (event) => event.buttons && this.point(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    requestAnimationFrame((now) => this.frame(now));
  }

  show(step) {
    this.step = step;
    this.at_us = 0;
    this.draw();
  }

  get length_us() {
    return 1e3 * this.step.step_ms;
  }
  get seen_us() {
    return this.length_us / this.zoom;
  }
  get from_us() {
    return Math.max(0, Math.min(this.length_us - this.seen_us, this.at_us - this.seen_us / 2));
  }
  get slower() {
    return (SECONDS * 1e6) / this.seen_us;
  }

  frame(now) {
    const passed = this.last === null ? 0 : Math.min(0.1, (now - this.last) / 1e3);
    this.last = now;
    if (this.plays && this.step && !document.hidden) {
      this.at_us = (this.at_us + (passed * this.seen_us) / SECONDS) % this.length_us;
      this.draw();
    }
    requestAnimationFrame((next) => this.frame(next));
  }

  point(event) {
    if (!this.step) return;
    const { left, wide } = this.frame_of();
    this.at_us = this.clamped(this.from_us + ((event.offsetX - left) / wide) * this.seen_us);
    this.draw();
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 }[event.key];
    const to = { Home: 0, End: this.step ? this.length_us : 0 }[event.key];
    if (!this.step || (by === undefined && to === undefined)) return;
    event.preventDefault();
    this.at_us = this.clamped(to ?? this.at_us + (by * this.seen_us) / 100);
    this.draw();
    const said = this.step.lanes.map(
      (lane) => `${short(lane.name)} ${title(this.step, span_at(lane, this.at_us) ?? [])}`,
    );
    this.canvas.setAttribute("aria-valuetext", `${few(this.at_us / 1e3)} ms: ${said.join("; ")}`);
  }

  clamped(us) {
    return Math.max(0, Math.min(this.length_us - 1e-3, us));
  }

  /** Where lanes are: beside their names, or below them where there is little room. */
  frame_of() {
    const width = this.canvas.clientWidth,
      narrow = width < NARROW;
    const left = narrow ? 0 : NAMES;
    return { width, narrow, left, wide: width - left - 1, lane: BAR + GAP + (narrow ? 18 : 0) };
  }

  draw() {
    if (!this.step || !this.canvas.clientWidth) return;
    const { width, narrow, left, wide, lane } = this.frame_of();
    const lanes = this.step.lanes,
      height = AXIS + lanes.length * lane;
    const dense = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    if (
      this.canvas.width !== Math.round(width * dense) ||
      this.canvas.height !== Math.round(height * dense)
    ) {
      this.canvas.width = Math.round(width * dense);
      this.canvas.height = Math.round(height * dense);
    }
    const to = this.canvas.getContext("2d"),
      css = getComputedStyle(this.canvas);
    const color = (name) => css.getPropertyValue(`--${name}`).trim();
    to.setTransform(dense, 0, 0, dense, 0, 0);
    to.clearRect(0, 0, width, height);
    to.font = `12px ${css.fontFamily}`;
    const from = this.from_us,
      x = (us) => left + ((us - from) / this.seen_us) * wide;
    this.draw_axis(to, color, x, left, wide, height);
    lanes.forEach((of, i) => {
      const top = AXIS + i * lane + (narrow ? 18 : 0);
      const now = span_at(of, this.at_us);
      to.textAlign = "left";
      to.fillStyle = color("ink");
      to.fillText(short(of.name), 0, narrow ? top - 6 : top + 11);
      to.fillStyle = color("soft");
      const words = now ? title(this.step, now) : "";
      if (narrow) {
        to.textAlign = "right";
        to.fillText(words, width, top - 6);
      } else to.fillText(words, 0, top + 25);
      to.save();
      to.beginPath();
      to.roundRect(left, top, wide, BAR, 4);
      to.clip();
      to.fillStyle = color("track");
      to.fillRect(left, top, wide, BAR);
      hatch(to, left, top, wide, color("bubble"));
      for (const span of of.spans) this.draw_span(to, color, x, top, span, left, wide);
      to.restore();
    });
    const line = x(this.at_us);
    to.fillStyle = color("ink");
    to.fillRect(line - 0.75, AXIS - 6, 1.5, height - AXIS + 6 - GAP + 4);
    this.canvas.setAttribute("aria-valuemin", "0");
    this.canvas.setAttribute("aria-valuemax", this.step.step_ms.toFixed(3));
    this.canvas.setAttribute("aria-valuenow", (this.at_us / 1e3).toFixed(3));
  }

  draw_axis(to, color, x, left, wide, height) {
    const each = nice(this.seen_us / Math.max(2, wide / 130));
    to.textAlign = "center";
    for (
      let us = Math.ceil(this.from_us / each) * each;
      us <= this.from_us + this.seen_us + 1e-6;
      us += each
    ) {
      to.fillStyle = color("line");
      to.fillRect(x(us), AXIS - 6, 1, height);
      const words = `${+(us / 1e3).toFixed(3)} ms`,
        half = to.measureText(words).width / 2;
      to.fillStyle = color("soft");
      to.fillText(words, Math.max(left + half, Math.min(left + wide - half, x(us))), 12);
    }
  }

  draw_span(to, color, x, top, span, left, wide) {
    const [kind, number, batch, start, length] = span,
      name = this.step.kinds[kind];
    const begin = Math.max(left, x(start)),
      end = Math.min(left + wide, x(start + length));
    if (name === "bubble" || end <= begin) return;
    to.globalAlpha = batch > 0 && batch % 2 ? 0.68 : 1; // staggered batches are told apart
    to.fillStyle = color(name);
    to.fillRect(begin, top, end - begin, BAR);
    to.globalAlpha = 1;
    if (end - begin > 26) {
      // neighbours of one kind are told apart
      to.fillStyle = color("panel");
      to.fillRect(end - 0.5, top, 0.5, BAR);
      const words = [title(this.step, span), `${number}`].find(
        (w) => to.measureText(w).width < end - begin - 10,
      );
      if (number < 0 || !words) return;
      to.fillStyle = color("on-bar");
      to.textAlign = "center";
      to.fillText(words, (begin + end) / 2, top + 17);
    }
  }
}

/** What a rank was at, `span` being one of its lane's. */
export function title(step, [kind, number, batch]) {
  const name = step.kinds[kind];
  if (name === "bubble") return "idle";
  if (name === undefined || number < 0) return name ?? "nothing";
  const batches = step.lanes.some((of) => of.spans.some((span) => span[2] > 0));
  return `${WORK[name] ?? name} ${number}${batches ? `, batch ${batch}` : ""}`;
}

/** Milliseconds of each kind. */
export function totals(step, lane) {
  const found = Object.fromEntries(step.kinds.map((kind) => [kind, 0]));
  for (const [kind, , , , length] of lane.spans) found[step.kinds[kind]] += length / 1e3;
  return found;
}

/** "rank 1 (attention worker 0)" in fewer words. */
export const short = (name) => name.replace(/ \((\w+) worker (\d+)\)/, " · $1 $2");

const span_at = (lane, us) => lane.spans.find(([, , , start, length]) => start <= us && us < start + length);

function nice(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((x) => x * power).find((x) => x >= least);
}

function hatch(to, left, top, wide, color) {
  to.strokeStyle = color;
  to.lineWidth = 1.4;
  to.beginPath();
  for (let at = left - BAR; at < left + wide; at += 7) {
    to.moveTo(at, top + BAR);
    to.lineTo(at + BAR, top);
  }
  to.stroke();
}

export const slowed = (gantt) => `${few(gantt.slower)} times slower than it ran`;
