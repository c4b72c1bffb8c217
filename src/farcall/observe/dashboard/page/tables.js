// The columns of all tables, and how tables are made of them.
//
// A column has a title and a function that reads its text from a row. `kind` is "name" or "text" where it holds no
// number; `mark` gives the class of a cell that is "warn" or "bad"; `key` is the field that workers are sorted by.
import { count, duration, make, size } from "./words.js";

export const isWell = (name) => name === "running" || name === "serving"; // it waits in shutdown() for the others
export const isBad = (worker) => worker.state === "gone" || worker.state === "unresponsive" || worker.state === "expelled";

// Calls wait while every thread is in a function that does not wait for a call itself.
export const isFull = (worker) => worker.queued > 0 && worker.busy - worker.parked >= worker.threads;

const badIf = (test) => (row) => (test(row) ? "bad" : "");
const ifKnown = (read) => (worker) => (worker.threads === undefined ? "" : read(worker)); // of a silent worker nothing is

export const WORKERS = [
  { key: "rank", title: "rank", read: (worker) => worker.rank },
  { key: "name", title: "worker", read: (worker) => worker.name, kind: "name" },
  { key: "state", title: "state", read: (worker) => worker.state, kind: "text", mark: (worker) => (isBad(worker) ? "bad" : isWell(worker.state) ? "" : "warn") },
  { key: "cpus", title: "cpu", read: ifKnown((worker) => `${Math.round(100 * worker.cpus)} %`) },
  { key: "memory", title: "memory", read: (worker) => (worker.memory ? size(worker.memory) : "") },
  { key: "calls", title: "calls/s", read: (worker) => count(worker.calls) },
  { key: "served", title: "served/s", read: (worker) => count(worker.served) },
  { key: "p50", title: "median", read: (worker) => duration(worker.p50) },
  { key: "p99", title: "99 %", read: (worker) => duration(worker.p99) },
  { key: "errors_in_all", title: "errors", read: (worker) => count(worker.errors_in_all), mark: badIf((worker) => worker.errors_in_all) },
  { key: "sent", title: "out/s", read: (worker) => size(worker.sent) },
  { key: "received", title: "in/s", read: (worker) => size(worker.received) },
  { key: "in_flight", title: "made/served", read: ifKnown((worker) => `${count(worker.in_flight)}/${count(worker.serving)}`) },
  { key: "queued", title: "queued", read: (worker) => count(worker.queued), mark: (worker) => (isFull(worker) ? "warn" : "") },
  { key: "busy", title: "threads", read: ifKnown((worker) => `${worker.busy}/${worker.threads}`) },
  { key: "owned", title: "refs", read: ifKnown((worker) => `${count(worker.owned)}/${count(worker.used)}`) },
  { key: "host", title: "host", read: (worker) => worker.host ?? "", kind: "text" },
];

const errors = (row) => [[row.failed, "failed"], [row.timed_out, "timed out"], [row.lost, "lost"]].filter(([number]) => number).map(([number, how]) => `${count(number)} ${how}`).join(", ");

export const CALLS = [
  { title: "function", read: (row) => row.function, kind: "name" },
  { title: "calls", read: (row) => count(row.calls) },
  { title: "under way", read: (row) => count(row.under_way) },
  { title: "median", read: (row) => duration(row.p50) },
  { title: "99 %", read: (row) => duration(row.p99) },
  { title: "errors", read: errors, mark: badIf(errors) },
];

export const FUNCTIONS = [
  { title: "function", read: (row) => row.function, kind: "name" },
  { title: "runs/s", read: (row) => count(row.runs) },
  { title: "runs in all", read: (row) => count(row.total) },
  { title: "under way", read: (row) => count(row.under_way) },
  { title: "median", read: (row) => duration(row.p50) },
  { title: "90 %", read: (row) => duration(row.p90) },
  { title: "99 %", read: (row) => duration(row.p99) },
  { title: "threads held", read: (row) => count(row.threads) },
  { title: "failed", read: (row) => count(row.failed), mark: badIf((row) => row.failed) },
];

export const CHANNELS = [
  { title: "channel", read: (row) => row.channel, kind: "text" },
  { title: "ends", read: (row) => count(row.links) },
  { title: "sent/s", read: (row) => size(row.sent_per_s) },
  { title: "sent in all", read: (row) => size(row.sent) },
];

export const WEIGHTS = [
  { title: "name", read: (row) => row.name, kind: "name" },
  { title: "publisher", read: (row) => row.publisher || (row.closed ? "closed" : "nobody"), kind: "text", mark: badIf((row) => !row.publisher && !row.closed) },
  { title: "version", read: (row) => row.version },
  { title: "size", read: (row) => size(row.size) },
  { title: "pushes/s", read: (row) => count(row.pushes) },
  { title: "copied/s", read: (row) => size(row.copied) },
  { title: "behind", read: (row) => count(row.behind), mark: badIf((row) => row.behind) },
  { title: "who has which", read: (row) => row.who, kind: "text" },
];

export const WAITING = [
  { title: "for", read: (call) => duration(call.for_s) },
  { title: "caller", read: (call) => call.caller, kind: "text" },
  { title: "callee", read: (call) => call.callee, kind: "text" },
  { title: "function", read: (call) => call.function, kind: "name" },
  { title: "there", read: (call) => call.state, kind: "text" },
];

export function heads(columns, attributes = () => ({})) {
  return make("thead", {}, make("tr", {}, ...columns.map((column) => make("th", { class: column.kind ? "text" : "", ...attributes(column) }, column.title))));
}

export function cells(columns, row) {
  return columns.map(({ read, kind, mark }) => {
    const text = String(read(row) ?? "");
    return make("td", { class: `${kind ?? ""} ${mark?.(row) ?? ""}`.trim(), title: kind === "name" ? text : false }, text);
  });
}

export function table(place, columns, rows, nothing) {
  if (!rows.length) place.replaceChildren(make("tbody", {}, make("tr", {}, make("td", { class: "text muted" }, nothing))));
  else place.replaceChildren(heads(columns), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(columns, row)))));
}
