"use strict";
// Draws the report from its data; called again with new data while a run is watched. Text goes in as text, never as HTML.

const COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6", "#8c8c8c", "#439894", "#d67195", "#bab0ac"];
const charts = new Map(); // id of its element: the uPlot object and what it shows
let shown = null;

function make(tag, attributes, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  for (const child of inside) element.append(child);
  return element;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x)) return x.toLocaleString("en");
  const size = Math.abs(x);
  return size >= 1e5 || size < 1e-3 ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)));
}

function duration(seconds) {
  const s = Math.round(seconds);
  return s < 100 ? `${number(seconds)} s` : s < 6000 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

// ---- charts: lines over steps, or points (parity); drag to zoom, double click to go back

function digit(x, round) { // to one digit
  const power = 10 ** Math.floor(Math.log10(x));
  return Number((round(x / power + (round === Math.floor ? 1e-9 : -1e-9)) * power).toPrecision(1));
}

function options(spec, width) {
  const axis = (label, size) => ({ label, stroke: css("--ink"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, labelSize: 22, size, font: "12px system-ui" });
  const even = (u, ticks, axis, space, step) => ticks.map((v) => (v === null ? "" : Math.abs(v) >= 1e5 || step < 1e-4 ? number(v) : v.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)))));
  const values = spec.log ? (u, ticks) => ticks.map((v) => (v === null ? "" : number(v))) : even;
  const wide = (u, low, high) => (spec.log ? (low > 0 ? [digit(low, Math.floor), digit(high, Math.ceil)] : [0.1, 1]) : uPlot.rangeNum(low, high, 0.05, true));
  return {
    width, height: spec.square ? Math.min(width, 340) : 260,
    scales: { x: { time: false }, y: { distr: spec.log ? 3 : 1, range: wide } },
    axes: [{ ...axis(spec.xlabel, 42), values: even }, { ...axis(spec.ylabel || "", 62), values }],
    cursor: { drag: { x: true, y: true, uni: 30 } },
    series: [{ label: spec.xlabel, value: (u, v) => number(v, 5) }, ...spec.series.map((s) => ({
      label: s.label, stroke: s.color, width: s.points ? 0 : s.width || 1.5, spanGaps: true, value: (u, v) => number(v),
      ...(s.points ? { paths: () => null, points: { show: true, size: 4, fill: s.color, stroke: s.color } } : { points: { show: spec.x.length < 30 && s.label !== "ideal", size: 5 } }),
    }))],
  };
}

function chart(holder, id, spec) {
  const clean = (y) => y.map((v) => (v === null || !Number.isFinite(v) || (spec.log && v <= 0) ? null : v));
  const data = [spec.x, ...spec.series.map((s) => clean(s.y))];
  const place = make("div", { id });
  holder.append(make("div", { class: "card" }, make("h3", {}, spec.title), place));
  const zoom = charts.get(id)?.zoom;
  requestAnimationFrame(() => {
    const plot = new uPlot(options(spec, place.clientWidth || 320), data, place);
    const entry = { plot, spec, zoom: null };
    charts.set(id, entry);
    if (zoom) plot.setScale("x", zoom);
    plot.hooks.setScale = [(u, key) => {
      if (key === "x") entry.zoom = u.scales.x.min > spec.x[0] || u.scales.x.max < spec.x.at(-1) ? { min: u.scales.x.min, max: u.scales.x.max } : null;
    }];
  });
}

function table(head, rows) {
  const cells = (tag, row) => make("tr", {}, ...row.map((cell) => make(tag, {}, cell instanceof Node ? cell : number(cell))));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, cells("th", head)), make("tbody", {}, ...rows.map((row) => cells("td", row)))));
}

function section(title, ...inside) {
  const body = make("section", {}, make("h2", {}, title), ...inside);
  document.getElementById("report").append(body);
  return body;
}

// ---- the parts

function tiles(d) {
  const last = d.metrics.at(-1) || {}, facts = d.facts;
  const rows = [["steps", last.step ?? d.curve?.columns.step.at(-1)], ["workers", facts["world size"]], ["device", facts["computing device"]], ["engine", facts.engine?.split(",")[0]],
    ["samples per second", last.samples_per_second], ["time so far", last.elapsed === undefined ? null : duration(last.elapsed)], ["frames a step", facts["global batch"]?.split(" frames")[0]],
    ["memory, MB", last.memory_mb ? Math.round(Math.max(...last.memory_mb)) : null]];
  return make("div", { class: "tiles" }, ...rows.filter((r) => r[1] !== null && r[1] !== undefined && r[1] !== "").map(([name, value]) => make("div", { class: "tile" }, make("span", { class: "dim" }, name), make("b", {}, number(value, 4)))));
}

function curves(d) {
  if (!d.curve) return;
  const grid = make("div", { class: "grid" });
  section("Learning curve", make("p", { class: "dim" }, "Drag over a part to zoom, double click to go back; click a name to hide its line."), grid);
  for (const [quantity, title] of Object.entries(d.curve.titles)) {
    const series = [["trn", "training", 1], ["val", "validation", 1.8]].filter(([end]) => d.curve.columns[`${quantity}_${end}`])
      .map(([end, label, width]) => ({ label, y: d.curve.columns[`${quantity}_${end}`], color: css(`--${end}`), width }));
    chart(grid, `curve-${quantity}`, { title, x: d.curve.columns.step, xlabel: "step", log: true, series });
  }
  if (d.curve.columns.lr) chart(grid, "curve-lr", { title: "learning rate", x: d.curve.columns.step, xlabel: "step", log: true, series: [{ label: "rate", y: d.curve.columns.lr, color: css("--accent") }] });
}

function parity(d) {
  if (!d.parity.length) return;
  const grid = make("div", { class: "grid" });
  section("Predictions against labels (dp test)", grid);
  d.parity.forEach((p, k) => chart(grid, `parity-${k}`, { title: `${p.name}: RMSE ${number(p.rmse)} ${p.unit}, MAE ${number(p.mae)} ${p.unit}`, square: true, x: p.data, xlabel: `label, ${p.unit}`, ylabel: "prediction",
    series: [{ label: "ideal", y: p.data, color: css("--dim"), width: 1 }, { label: `prediction (${number(p.data.length)} of ${number(p.count)})`, y: p.pred, color: css("--accent"), points: true }] }));
}

function phases(d) {
  const rows = d.metrics.filter((row) => row.steps > 0);
  if (!rows.length) return;
  const spent = d.end?.phases || rows.reduce((sum, row) => { for (const [n, s] of Object.entries(row.phases)) sum[n] = (sum[n] || 0) + s; return sum; }, {});
  const total = Object.values(spent).reduce((a, b) => a + b, 0) || 1, names = Object.keys(spent).filter((n) => spent[n] / total > 0.0005);
  const color = (k) => COLORS[k % COLORS.length];
  const bar = make("div", { class: "bar", role: "img", "aria-label": "shares of the phases" }, ...names.map((n, k) => make("span", { title: `${n} ${number(100 * spent[n] / total)} %`, style: `background:${color(k)};flex:${spent[n] / total}` })));
  const swatch = (n, k) => { const cell = make("span", {}, make("span", { class: "swatch", style: `background:${color(k)}` })); cell.append(n); return cell; };
  const grid = make("div", { class: "grid" }, make("div", { class: "card" }, make("h3", {}, "seconds, mean over the workers"), bar, table(["phase", "seconds", "share"], names.map((n, k) => [swatch(n, k), spent[n], `${(100 * spent[n] / total).toFixed(1)} %`]))));
  section("Where the time went", grid);
  if (rows.length > 1) chart(grid, "speed", { title: "samples per second", x: rows.map((r) => r.step), xlabel: "step", series: [{ label: "all workers", y: rows.map((r) => r.samples_per_second), color: css("--accent") }] });
}

function communication(d) {
  if (!d.end?.communication?.length) return;
  section("Communication of worker 0", table(["routine", "calls", "bytes a call", "seconds"], d.end.communication.map((c) => [c.routine, c.calls, Math.round(c.bytes / c.calls), c.seconds])),
    make("p", { class: "dim" }, `Waiting for other workers, seconds: ${d.end.waiting.map((w) => number(w)).join(", ")} (workers 0, 1, …)`));
}

function scaling(d) {
  for (const [k, s] of d.scaling.entries()) {
    const grid = make("div", { class: "grid" }), percent = (x) => `${(100 * x).toFixed(1)} %`;
    section(`Scaling: ${s.title}`, grid);
    const workers = [...new Set(s.rows.map((r) => r.workers))].sort((a, b) => a - b);
    const of = (engine) => workers.map((w) => s.rows.find((r) => r.workers === w && (r.engine === engine || w === 1))?.speed_up ?? null);
    const engines = [...new Set(s.rows.filter((r) => r.workers > 1).map((r) => r.engine))];
    chart(grid, `scaling-${k}`, { title: "speed up", x: workers, xlabel: "workers", series: [{ label: "ideal", y: workers, color: css("--dim"), width: 1 }, ...engines.map((e, j) => ({ label: e, y: of(e), color: COLORS[j % COLORS.length] }))] });
    grid.append(make("div", { class: "card" }, table(["workers", "engine", "samples/s", "spread", "speed up", "communication", "waiting"], s.rows.map((r) => [r.workers, r.engine, r.rate, percent(r.spread), r.speed_up, percent(r.communication), percent(r.waiting)]))));
  }
}

function background(d) {
  const facts = make("table", { class: "facts" }, ...Object.entries(d.facts).map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", {}, String(value)))));
  if (Object.keys(d.facts).length) section("Environment", make("div", { class: "scroll" }, facts));
  if (d.input) section("Input", make("details", {}, make("summary", {}, d.input_name), make("pre", {}, d.input)));
}

function render(d) {
  shown = d;
  const report = document.getElementById("report");
  for (const { plot } of charts.values()) plot.destroy();
  report.replaceChildren(make("h1", {}, d.title), make("div", { class: "dim" }, d.subtitle));
  if (d.verdict) report.append(make("div", { class: "verdict" }, d.verdict));
  report.append(tiles(d));
  for (const part of [curves, parity, phases, communication, scaling, background]) part(d);
}

// ---- life: width, light and dark, new data

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone's address bar
  width = innerWidth;
  for (const { plot, spec } of charts.values()) plot.setSize({ width: plot.root.parentElement.clientWidth, height: spec.square ? Math.min(plot.root.parentElement.clientWidth, 340) : 260 });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render(shown));

async function follow(token) {
  const live = document.getElementById("live");
  for (let known = JSON.stringify(shown); ; await new Promise((done) => setTimeout(done, 3000))) {
    try {
      const answer = await fetch(`data?token=${token}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      if (text !== known) render(JSON.parse(text));
      known = text;
      live.textContent = `live, ${new Date().toLocaleTimeString()}`;
    } catch (error) {
      live.textContent = "not live any more: dp report --watch has ended";
    }
  }
}

render(JSON.parse(document.getElementById("data").textContent));
const token = new URLSearchParams(location.search).get("token");
if (location.protocol === "http:" && token) follow(token);
