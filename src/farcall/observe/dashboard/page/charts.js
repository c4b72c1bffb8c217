// Lines over time, as SVG: a few series, an axis of round numbers, and a cross that reads values under the pointer.
import { clock, make } from "./words.js";

const WIDTH = 560, HEIGHT = 150, LEFT = 62, RIGHT = 8, TOP = 6, BOTTOM = 20;
const NS = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function roundSteps(most, binary) {
  const rough = most / 4;
  const base = binary ? 1024 ** Math.floor(Math.log(Math.max(rough, 1)) / Math.log(1024)) : 10 ** Math.floor(Math.log10(rough));
  const choices = binary ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1, 2, 5, 10];
  const step = choices.map((one) => one * base).find((one) => one >= rough) ?? choices.at(-1) * base;
  const steps = [];
  for (let at = 0; at <= most + step * 0.999; at += step) steps.push(at);
  return steps;
}

export class Chart {
  // `options`: format (value -> text), logarithmic, binary.
  constructor(place, options) {
    this.options = options;
    this.series = [];
    this.keys = make("div", { class: "keys" });
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.root = make("div", { class: "chart" }, this.keys, this.drawing);
    place.replaceChildren(this.root);
    this.drawing.addEventListener("pointermove", (event) => this.read(event));
    this.drawing.addEventListener("pointerleave", () => { this.at = null; this.mark(); });
    this.at = null;
  }

  // Each series: {name, values}, one value for each of `times`; null where there is none.
  draw(times, series) {
    this.times = times;
    this.series = series;
    const drawing = this.drawing;
    drawing.replaceChildren();
    const values = series.flatMap((one) => one.values).filter((value) => value !== null && value > 0);
    if (times.length < 2) {
      drawing.append(svg("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "waiting for a second look …"));
      this.mark();
      return;
    }
    const first = times[0], last = Math.max(times.at(-1), first + 1);
    this.x = (at) => LEFT + ((at - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
    const steps = this.scale(values);
    for (const step of steps) {
      const y = this.y(step);
      drawing.append(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" }));
      drawing.append(svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.options.format(step)));
    }
    for (const at of [first, (first + last) / 2, last]) {
      const anchor = at === first ? "start" : at === last ? "end" : "middle";
      drawing.append(svg("text", { x: this.x(at), y: HEIGHT - 4, "text-anchor": anchor }, clock(at)));
    }
    series.forEach((one, index) => drawing.append(svg("path", { d: this.path(one.values), class: `s${index % 4}` })));
    this.cross = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cross" });
    drawing.append(this.cross);
    this.mark();
  }

  scale(values) {
    const low = HEIGHT - BOTTOM, span = HEIGHT - BOTTOM - TOP;
    if (this.options.logarithmic) {
      const from = Math.floor(Math.log10(Math.min(...values, 1e-3)) + 1e-9), to = Math.ceil(Math.log10(Math.max(...values, 1e-4)) - 1e-9);
      const top = Math.max(to, from + 1);
      this.y = (value) => low - ((Math.log10(Math.max(value, 10 ** from)) - from) / (top - from)) * span;
      const every = Math.ceil((top - from) / 5);
      return Array.from({ length: Math.floor((top - from) / every) + 1 }, (_, index) => 10 ** (from + index * every));
    }
    const steps = roundSteps(Math.max(...values, this.options.least ?? 1), this.options.binary);
    this.y = (value) => low - (value / steps.at(-1)) * span;
    return steps;
  }

  path(values) {
    let path = "", pen = "M";
    values.forEach((value, index) => {
      if (value === null || (this.options.logarithmic && !(value > 0))) { pen = "M"; return; }
      path += `${pen}${this.x(this.times[index]).toFixed(1)} ${this.y(value).toFixed(1)}`;
      pen = "L";
    });
    return path;
  }

  read(event) {
    if (!this.x || this.times.length < 2) return;
    const box = this.drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    let nearest = 0;
    this.times.forEach((time, index) => { if (Math.abs(this.x(time) - at) < Math.abs(this.x(this.times[nearest]) - at)) nearest = index; });
    this.at = this.times[nearest];
    this.mark();
  }

  mark() {
    const found = this.at === null ? -1 : this.times.indexOf(this.at);
    const index = found < 0 ? (this.times?.length ?? 0) - 1 : found;
    if (this.cross) {
      this.cross.style.display = found < 0 ? "none" : "";
      if (found >= 0) for (const side of ["x1", "x2"]) this.cross.setAttribute(side, this.x(this.times[found]));
    }
    const keys = this.series.map((one, number) => {
      const value = one.values[index];
      const text = value === null || value === undefined ? "–" : this.options.format(value);
      return make("span", {}, make("i", { class: `s${number % 4}` }), `${one.name} ${text}`);
    });
    if (found >= 0) keys.push(make("span", {}, clock(this.at)));
    this.keys.replaceChildren(...keys);
  }
}
