// Callers and callees on a canvas: rows call, columns are called. Large squares have numbers, names stand beside them
// where there is room, and the pointer shows everything.
import { count, duration, size } from "./words.js";

const FIELDS = { calls: 2, total: 3, p50: 4, p99: 5, errors: 6, bytes: 7, open: 8 };
const FORMATS = { calls: count, total: count, p50: duration, p99: duration, errors: count, bytes: (value) => size(value), open: count };

export class Matrix {
  constructor(canvas, place, tip, legend, onChosen) {
    this.canvas = canvas;
    this.place = place;
    this.tip = tip;
    this.legend = legend;
    this.names = [];
    this.by = "calls";
    this.hovered = null;
    this.chosen = null;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { this.hovered = null; this.tip.hidden = true; this.draw(); });
    canvas.addEventListener("click", () => { if (this.hovered) { this.chosen = this.hovered.slice(); this.draw(); onChosen(this.names[this.chosen[0]], this.names[this.chosen[1]]); } });
  }

  update(workers, pairs) {
    this.names = workers.map((worker) => worker.name);
    const index = new Map(this.names.map((name, at) => [name, at]));
    this.cells = new Map();
    for (const pair of pairs) {
      const row = index.get(pair[0]), column = index.get(pair[1]);
      if (row !== undefined && column !== undefined) this.cells.set(row * this.names.length + column, pair);
    }
    this.draw();
  }

  at(row, column) { return this.cells.get(row * this.names.length + column); }

  draw() {
    const names = this.names, number = names.length, canvas = this.canvas;
    if (!number || !this.place.clientWidth) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const ratio = window.devicePixelRatio || 1;
    const room = this.place.clientWidth - 12;
    const brush = canvas.getContext("2d");
    brush.font = "12px system-ui, sans-serif";
    const longest = Math.min(170, Math.max(...names.map((name) => brush.measureText(name).width)) + 10);
    const high = Math.max(innerHeight - 320, 360);  // so that the whole of a small one is to be seen at once
    const cell = Math.max(4, Math.min(46, Math.floor((room - longest) / number), Math.floor(high / number)));
    const named = cell >= 12;
    const left = this.left = named ? Math.ceil(longest) : 36;
    const top = this.top = named ? Math.ceil(longest * 0.72) + 8 : 22;
    this.cell = cell;
    const width = left + cell * number + (named ? Math.ceil(longest * 0.72) : 4), height = top + cell * number + 4;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    brush.scale(ratio, ratio);
    brush.font = "12px system-ui, sans-serif";
    const values = [...this.cells.values()].map((pair) => pair[FIELDS[this.by]]).filter((value) => value > 0);
    const most = Math.max(...values, 0), least = Math.min(...values, most);
    // Rates differ by orders of magnitude, so shades follow the logarithm; values that are much the same look the same.
    const span = Math.log(Math.max(most / least, 10));
    const shade = (value) => (value <= 0 ? 0 : 1 - (0.86 * Math.log(most / value)) / span);
    const heat = this.by === "errors" ? null : colour("--heat"), bad = colour("--bad");
    const line = colour("--line"), text = colour("--text"), muted = colour("--muted"), panel = colour("--panel");
    const ground = colour("--hover"), ink = heat ? `rgb(${heat})` : bad;
    const gap = cell >= 9 ? 1 : 0;
    for (let row = 0; row < number; row += 1) {
      for (let column = 0; column < number; column += 1) {
        const pair = this.at(row, column), value = pair?.[FIELDS[this.by]] ?? 0;
        const x = left + column * cell, y = top + row * cell, strength = shade(value);
        brush.globalAlpha = 1;
        brush.fillStyle = row === column ? line : ground;
        brush.fillRect(x, y, cell - gap, cell - gap);
        if (strength > 0) {
          brush.globalAlpha = strength;
          brush.fillStyle = ink;
          brush.fillRect(x, y, cell - gap, cell - gap);
          brush.globalAlpha = 1;
          if (cell >= 30) {
            brush.fillStyle = strength > 0.72 ? panel : text;
            brush.textAlign = "center";
            brush.font = "10px system-ui, sans-serif";
            brush.fillText(FORMATS[this.by](value).replace(" ", ""), x + cell / 2, y + cell / 2 + 4, cell - 4);
          }
        } else if (pair?.[FIELDS.open] > 0) {  // none has ended of late: streams, or long calls
          brush.fillStyle = muted;
          brush.fillRect(x + cell / 3, y + cell / 3, (cell - gap) / 3, (cell - gap) / 3);
        }
      }
    }
    brush.globalAlpha = 1;
    brush.font = "12px system-ui, sans-serif";
    const every = named ? 1 : Math.ceil(40 / cell / 5) * 5;
    names.forEach((name, at) => {
      if (at % every) return;
      const near = this.hovered && (this.hovered[0] === at || this.hovered[1] === at);
      brush.fillStyle = near ? text : muted;
      brush.textAlign = "right";
      brush.fillText(named ? shorten(brush, name, left - 10) : String(at), left - 6, top + at * cell + cell / 2 + 4);
      brush.textAlign = "left";
      brush.save();
      brush.translate(left + at * cell + cell / 2 + (named ? 2 : -4), top - 5);
      if (named) brush.rotate(-Math.PI / 4);
      brush.fillText(named ? shorten(brush, name, longest) : String(at), 0, 0);
      brush.restore();
    });
    for (const [mark, edge] of [[this.chosen, text], [this.hovered, colour("--accent")]]) {
      if (!mark) continue;
      brush.strokeStyle = edge;
      brush.lineWidth = 2;
      brush.strokeRect(left + mark[1] * cell, top + mark[0] * cell, cell - gap, cell - gap);
    }
    const format = FORMATS[this.by];
    this.legend.replaceChildren();
    if (values.length) this.legend.append(format(least), document.createElement("i"), format(most));
    else this.legend.append("nothing to show yet");
    this.legend.classList.toggle("errors", this.by === "errors");
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left) / this.cell), row = Math.floor((event.clientY - box.top - this.top) / this.cell);
    const inside = row >= 0 && column >= 0 && row < this.names.length && column < this.names.length;
    const before = String(this.hovered);
    this.hovered = inside ? [row, column] : null;
    this.tip.hidden = !inside;
    if (inside) {
      const pair = this.at(row, column);
      const lines = [`${this.names[row]} → ${this.names[column]}`];
      if (pair) {
        lines.push(`${count(pair[2])} calls/s, ${count(pair[3])} in all, ${count(pair[8])} under way`, `median ${duration(pair[4])}, 99 % within ${duration(pair[5])}`);
        lines.push(`${size(pair[7])}/s, ${count(pair[6])} errors`);
      } else lines.push("no calls");
      this.tip.textContent = lines.join("\n");
      this.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 260)}px`;
      this.tip.style.top = `${Math.min(event.clientY + 14, innerHeight - 100)}px`;
    }
    if (before !== String(this.hovered)) this.draw();
  }
}

function shorten(brush, text, width) {
  if (brush.measureText(text).width <= width) return text;
  while (text.length > 3 && brush.measureText(text + "…").width > width) text = text.slice(0, -1);
  return text + "…";
}
