// The page: asks for the latest state, about once a second, and shows it. It can change nothing in the cluster.
import { Chart } from "./charts.js";
import { Matrix } from "./matrix.js";
import { CALLS, CHANNELS, FUNCTIONS, WAITING, WEIGHTS, WORKERS, cells, heads, isBad, isFull, isWell, table } from "./tables.js";
import { clock, count, duration, fill, make, size } from "./words.js";

const MOST_POINTS = 600;
const LATE_S = 5;
const find = (id) => document.getElementById(id);
const rate = (value) => size(value) + "/s";
const empty = (text) => [make("p", { class: "empty" }, text)];

let state = null;
let points = [];
let paused = false;
let pressed = false, overdue = false;  // while a button is pressed, news wait: there is no click on what was replaced
let sorting = { key: "rank", down: false };
let eventKind = "all";
let openWorker = null;

// ------------------------------------------------------------------ theme and tabs

const THEMES = ["auto", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("farcall-theme") ?? "auto";

function applyTheme() {
  const dark = theme === "dark" || (theme === "auto" && systemDark.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  find("theme").textContent = `Theme: ${theme}`;
  matrix?.draw();
}

function showTab(name) {
  if (!find(name) || find(name).tagName !== "SECTION") name = "overview";
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== name;
  for (const button of document.querySelectorAll("nav button")) button.setAttribute("aria-selected", button.dataset.tab === name);
  show();
  scrollTo(0, 0);  // the address names the tab, and the browser would scroll to it
}

// ------------------------------------------------------------------ charts

const charts = {};
for (const [name, options] of Object.entries({
  calls: { format: count },
  latency: { format: duration, logarithmic: true },
  bytes: { format: rate, binary: true, least: 1024 },
  load: { format: count, least: 4 },
  "worker-calls": { format: count },
  "worker-latency": { format: duration, logarithmic: true },
})) charts[name] = new Chart(document.querySelector(`[data-chart="${name}"]`), options);

function drawCharts() {
  const times = points.map((point) => point.at);
  const line = (name, read) => ({ name, values: points.map(read) });
  charts.calls.draw(times, [line("all workers", (point) => point.calls)]);
  charts.latency.draw(times, [line("median", (point) => point.p50), line("90 %", (point) => point.p90), line("99 %", (point) => point.p99)]);
  const channels = [...new Set(points.flatMap((point) => Object.keys(point.channels)))].sort();
  charts.bytes.draw(times, channels.map((name) => line(name, (point) => point.channels[name] ?? null)));
  charts.load.draw(times, [line("busy threads", (point) => point.busy), line("in flight", (point) => point.in_flight), line("queued", (point) => point.queued)]);
}

// ------------------------------------------------------------------ overview

function sum(key) { return state.workers.reduce((total, worker) => total + (worker[key] ?? 0), 0); }

function showTiles() {
  const last = points.at(-1) ?? {};
  const recent = points.slice(-60).reduce((total, point) => total + point.errors, 0);
  const tiles = [
    ["calls per second", count(last.calls ?? 0)],
    ["median latency", duration(last.p50)],
    ["99 % within", duration(last.p99)],
    ["sent per second", size(sum("sent"))],
    ["calls in flight", count(sum("in_flight"))],
    ["calls queued", count(sum("queued")), state.workers.some(isFull)],
    ["references", count(sum("owned"))],
    ["errors of late", count(recent), recent > 0],
  ];
  find("tiles").replaceChildren(...tiles.map(([title, value, bad]) => make("div", { class: bad ? "tile bad" : "tile" }, make("span", {}, title), make("strong", {}, value))));
}

function showHealth() {
  const by = new Map();
  for (const worker of state.workers) by.set(worker.state, (by.get(worker.state) ?? 0) + 1);
  const chips = [...by].map(([name, number]) => {
    const kind = isWell(name) ? "good" : isBad({ state: name }) ? "bad" : "warn";
    return make("span", { class: `chip ${kind}` }, `${number} ${name}`);
  });
  find("health").replaceChildren(...chips);
  find("cluster").textContent = state.cluster ?? "";
  document.title = `farcall: ${state.workers.length} workers`;
}

function showSquares() {
  const place = find("squares");
  const most = Math.max(...state.workers.map((worker) => worker.calls ?? 0), 1e-9);
  const named = state.workers.length <= 48;
  place.classList.toggle("named", named);
  place.replaceChildren(...state.workers.map((worker) => {
    const button = make("button", { type: "button", class: isBad(worker) ? "bad" : isFull(worker) ? "warn" : "", "data-worker": worker.name, title: workerTitle(worker) }, named ? worker.name : String(worker.rank));
    if (!isBad(worker) && !isFull(worker)) button.style.backgroundColor = `rgba(var(--heat), ${(0.04 + 0.4 * Math.sqrt((worker.calls ?? 0) / most)).toFixed(3)})`;
    return button;
  }));
}

function workerTitle(worker) {
  if (isBad(worker)) return `${worker.name}: ${worker.state}: ${worker.why}`;
  return `${worker.name}: ${count(worker.calls)} calls/s, serves ${count(worker.served)}/s, 99 % within ${duration(worker.p99)}`;
}

// ------------------------------------------------------------------ tables

function showWorkers() {
  const wanted = find("worker-filter").value.trim().toLowerCase();
  const matching = state.workers.filter((worker) => !wanted || [worker.name, worker.host, worker.state].some((text) => (text ?? "").toLowerCase().includes(wanted)));
  const sorted = matching.sort((one, other) => {
    const [a, b] = [one[sorting.key] ?? -1, other[sorting.key] ?? -1];
    const order = typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b), "en", { numeric: true }) : a - b;
    return (sorting.down ? -order : order) || one.rank - other.rank;
  });
  find("worker-shown").textContent = matching.length === state.workers.length ? `${matching.length} workers` : `${matching.length} of ${state.workers.length} workers`;
  const head = heads(WORKERS, (column) => ({ "data-sort": column.key, "aria-sort": sorting.key === column.key ? (sorting.down ? "descending" : "ascending") : false }));
  const body = make("tbody", {}, ...sorted.map((worker) => {
    const row = cells(WORKERS, worker);
    if (isBad(worker)) row.splice(3, row.length - 3, make("td", { class: "why text", colspan: WORKERS.length - 3 }, worker.why));
    return make("tr", { "data-worker": worker.name }, ...row);
  }));
  find("worker-table").replaceChildren(head, body);
}

function showFunctions() {
  table(find("function-table"), FUNCTIONS, state.functions ?? [], "no function has run yet");
}

function showMemory() {
  const owners = state.workers.filter((worker) => worker.owned > 0).sort((one, other) => other.owned - one.owned);
  const most = Math.max(...owners.map((worker) => worker.owned), 1);
  find("owners").replaceChildren(...(owners.length ? owners.slice(0, 60).map((worker) => {
    const bar = make("i");
    bar.style.width = `${(100 * worker.owned) / most}%`;
    return make("div", {}, make("span", { title: worker.name }, worker.name), make("span", {}, bar), make("span", {}, count(worker.owned)));
  }) : empty("nobody refers to anything")));
  table(find("channel-table"), CHANNELS, state.channels ?? [], "nothing was sent yet");
  table(find("weights-table"), WEIGHTS, state.weights ?? [], "nobody publishes weights");
}

// ------------------------------------------------------------------ waiting and events

function stack(title, end, otherwise) {
  const frames = end ? end.frames.map((frame) => make("li", {}, frame)) : [make("li", {}, otherwise)];
  return make("div", {}, make("h4", {}, title + (end ? `, thread ${end.thread}` : "")), make("ol", { class: "frames" }, ...frames));
}

function waitingCall(call) {
  const limit = call.timeout_s ? `of ${duration(call.timeout_s)}` : "no timeout";
  const there = call.state || "not there yet, or answered";
  return make("details", { class: "call", "data-call": `${call.caller} ${call.call}` },
    make("summary", {}, make("span", { class: "for" }, duration(call.for_s)), make("span", { class: "what" }, `${call.caller} → ${call.callee} ${call.function}()`), make("span", { class: "muted" }, `${limit}; there: ${there}`)),
    make("div", { class: "ends" }, stack(`${call.caller} calls`, call.at_caller, "no thread waits for it"), stack(`${call.callee} serves`, call.at_callee, there)));
}

function showWaiting() {
  const list = find("waiting-list");
  const open = new Set([...list.querySelectorAll("details[open]")].map((one) => one.dataset.call));
  const calls = state.waiting ?? [];
  list.replaceChildren(...(calls.length ? calls.map(waitingCall) : empty("no call is waiting")));
  for (const one of list.children) if (open.has(one.dataset.call)) one.open = true;
}

function showShortWaiting() {
  const calls = (state.waiting ?? []).slice(0, 6);
  table(find("short-waiting").firstElementChild ?? find("short-waiting").appendChild(make("table")), WAITING, calls, "no call is waiting");
}

const KINDS = {
  failed: ["errors", "bad"], "timed out": ["errors", "bad"], dead: ["members", "bad"], unresponsive: ["members", "warn"],
  recovered: ["members", "good"], joined: ["members", "good"], left: ["members", ""], interrupted: ["links", "warn"], reconnected: ["links", "good"],
};

function eventText(event) {
  const [by, ...more] = event.seen_by;
  if (event.kind === "failed") return `${event.what}() raised on ${by}, called by ${event.worker}`;
  if (event.kind === "timed out") return `${by} waited in vain for ${event.worker} to answer ${event.what}()`;
  if (event.kind === "interrupted") return `the connection of ${by} to ${event.worker} broke`;
  if (event.kind === "reconnected") return `${by} and ${event.worker} are connected again`;
  return `${event.worker}, as seen by ${by}${more.length > 2 ? ` and ${more.length} others` : more.map((name) => `, ${name}`).join("")}`;
}

function eventRow(event) {
  return make("div", { class: `event ${KINDS[event.kind]?.[1] ?? ""}` }, make("time", {}, clock(event.at)), make("span", { class: "kind" }, event.kind),
    make("span", { class: "text" }, eventText(event), event.times > 1 ? ` ×${event.times}` : null, event.text ? make("small", {}, " " + event.text) : null));
}

function fillEvents(place, events) {
  const key = eventKind + JSON.stringify(events.map((event) => [event.at, event.seen_by.length, event.times]));
  fill(place, key, () => (events.length ? events.map(eventRow) : empty("nothing has happened")));
}

const showShortEvents = () => fillEvents(find("short-events"), (state.events ?? []).slice(0, 8));
const showEvents = () => fillEvents(find("event-list"), (state.events ?? []).filter((event) => eventKind === "all" || (KINDS[event.kind]?.[0] ?? "") === eventKind));

function showTroubles() {
  const place = find("troubles");
  const open = new Map([...place.querySelectorAll("details")].map((one) => [one.dataset.about, one.open]));
  const troubles = state.troubles ?? [];
  fill(place, JSON.stringify(troubles), () => troubles.map((trouble) => {
    const head = [make("b", {}, trouble.kind), trouble.text];
    if (!trouble.steps.length) return make("div", { class: "trouble" }, ...head);
    const isOpen = open.get(trouble.text) ?? trouble.steps.length <= 6;
    const steps = trouble.steps.map((step) => make("li", {}, step));
    return make("div", { class: "trouble" }, make("details", { open: isOpen, "data-about": trouble.text }, make("summary", {}, ...head), make("ol", {}, ...steps)));
  }));
}

function showCounts() {
  const waits = (state.waiting ?? []).length, bad = (state.events ?? []).filter((event) => KINDS[event.kind]?.[1] === "bad").length;
  for (const [name, number, isBadCount] of [["workers", state.workers.length, state.workers.some(isBad)], ["waiting", waits, (state.troubles ?? []).length > 0], ["events", (state.events ?? []).length, bad > 0]]) {
    const badge = document.querySelector(`[data-count="${name}"]`);
    badge.textContent = number ? (number >= 200 && name === "events" ? "200+" : String(number)) : "";
    badge.classList.toggle("bad", isBadCount);
  }
}

// ------------------------------------------------------------------ one pair, one worker

async function get(address) {
  const answer = await fetch(address, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer.json();
}

const callsBetween = (from, to) => get(`calls.json?${new URLSearchParams({ from, to })}`);

async function showPair(from, to) {
  const rows = await callsBetween(from, to);
  const place = find("pair");
  place.querySelector("h2").textContent = `${from} → ${to}, since ${from} started`;
  table(place.querySelector("table"), CALLS, rows, "no calls");
}

async function showWorker(name) {
  openWorker = name;
  find("worker-name").textContent = name;
  updateWorker();
  if (!find("worker").open) find("worker").showModal();
  const [called, served] = await Promise.all([callsBetween(name, ""), callsBetween("", name)]);
  if (openWorker !== name) return;
  table(find("worker-called"), CALLS, called, "it calls nobody");
  table(find("worker-served"), CALLS, served, "nobody calls it");
}

function updateWorker() {
  const worker = state.workers.find((one) => one.name === openWorker);
  if (!worker) return;
  const facts = isBad(worker) ? [["state", worker.state], ["why", worker.why]] : [
    ["state", worker.state], ["rank", worker.rank], ["host", worker.host], ["process", worker.process], ["up", duration(worker.up_s)],
    ["calls/s", count(worker.calls)], ["served/s", count(worker.served)], ["99 % within", duration(worker.p99)], ["out / in per s", `${size(worker.sent)} / ${size(worker.received)}`],
    ["in flight / serving", `${worker.in_flight} / ${worker.serving}`], ["queued", worker.queued], ["threads busy / waiting / all", `${worker.busy} / ${worker.parked} / ${worker.threads}`],
    ["references owned / used", `${worker.owned} / ${worker.used}`], ["contexts", worker.contexts], ["errors", worker.errors_in_all], ["reconnects", worker.reconnects],
  ];
  find("worker-facts").replaceChildren(...facts.map(([title, value]) => make("div", {}, make("dt", {}, title), make("dd", {}, String(value)))));
  const times = points.map((point) => point.at);
  const line = (title, at) => ({ name: title, values: points.map((point) => point.workers[openWorker]?.[at] ?? null) });
  charts["worker-calls"].draw(times, [line("calls/s", 0)]);
  charts["worker-latency"].draw(times, [line("median", 1), line("99 %", 2)]);
}

// ------------------------------------------------------------------ all of it

const matrix = new Matrix(find("matrix-canvas"), find("matrix-place"), find("matrix-tip"), find("matrix-legend"), showPair);

function show() {
  if (!state) return;
  showHealth();
  showTroubles();
  showCounts();
  const tab = document.querySelector("main > section:not([hidden])").id;
  if (tab === "overview") { showTiles(); drawCharts(); showSquares(); showShortWaiting(); showShortEvents(); }
  if (tab === "workers") showWorkers();
  if (tab === "matrix") matrix.update(state.workers, state.pairs ?? []);
  if (tab === "functions") showFunctions();
  if (tab === "memory") showMemory();
  if (tab === "waiting") showWaiting();
  if (tab === "events") showEvents();
  if (find("worker").open) updateWorker();
}

function showLive(error) {
  const live = find("live");
  const age = state?.looked_at ? state.now - state.looked_at : 0;
  const lost = error || state?.error;
  live.className = lost ? "live lost" : paused || age > LATE_S ? "live late" : "live";
  live.lastElementChild.textContent = paused ? "paused" : lost ? "no connection" : age > LATE_S ? `${duration(age)} old` : "live";
  find("error").hidden = !lost;
  find("error").textContent = error ? `This page has lost its server: ${error}` : state?.error ? `The cluster cannot be seen: ${state.error}` : "";
}

async function ask() {
  let error = "";
  try {
    const fresh = await get(`state.json?since=${points.at(-1)?.number ?? 0}`);
    // Another server may answer at the same address: its numbers begin anew.
    if (state && fresh.number < state.number) points = [];
    points = points.concat(fresh.points.filter((point) => point.number > (points.at(-1)?.number ?? 0))).slice(-MOST_POINTS);
    const changed = !state || fresh.number !== state.number || fresh.error !== state.error;
    state = fresh;
    if (changed && !paused && pressed) overdue = true;
    else if (changed && !paused) show();
  } catch (reason) {
    error = reason.message ?? String(reason);
  }
  showLive(error);
  setTimeout(ask, document.hidden ? 5000 : 1000);
}

find("tabs").addEventListener("click", (event) => { const tab = event.target.closest("button")?.dataset.tab; if (tab) location.hash = tab; });
addEventListener("hashchange", () => showTab(location.hash.slice(1)));
find("theme").addEventListener("click", () => { theme = THEMES[(THEMES.indexOf(theme) + 1) % 3]; localStorage.setItem("farcall-theme", theme); applyTheme(); });
systemDark.addEventListener("change", applyTheme);
find("pause").addEventListener("click", () => { paused = !paused; find("pause").textContent = paused ? "Go on" : "Pause"; find("pause").setAttribute("aria-pressed", paused); if (!paused) show(); showLive(""); });
find("worker-filter").addEventListener("input", () => showWorkers());
find("worker-table").addEventListener("click", (event) => {
  const key = event.target.closest("th")?.dataset.sort;
  if (key) { sorting = { key, down: sorting.key === key ? !sorting.down : !["rank", "name", "state", "host"].includes(key) }; showWorkers(); }
});
document.addEventListener("click", (event) => { const name = event.target.closest("[data-worker]")?.dataset.worker; if (name) showWorker(name); });
find("worker-close").addEventListener("click", () => find("worker").close());
find("worker").addEventListener("close", () => { openWorker = null; });
find("matrix-by").addEventListener("change", (event) => { matrix.by = event.target.value; matrix.draw(); });
find("event-kinds").addEventListener("click", (event) => {
  const kind = event.target.dataset.kind;
  if (!kind) return;
  eventKind = kind;
  for (const button of find("event-kinds").children) button.setAttribute("aria-pressed", button.dataset.kind === kind);
  showEvents();
});
addEventListener("pointerdown", () => { pressed = true; }, true);
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => {
  if (overdue) setTimeout(show);  // after the click
  pressed = overdue = false;
}, true);
addEventListener("resize", () => { if (!find("matrix").hidden) matrix.draw(); });

applyTheme();
showTab(location.hash.slice(1) || "overview");
ask();
