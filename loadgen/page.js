"use strict";
// Draws a report from the data above. Times are ms; a request is [intended, wait, first, end, tokens, status, part],
// where wait, first and end count from the intended time and -1 stands for what did not come.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("page");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PERCENTILES = [0, 50, 90, 99, 99.9, 99.99];

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function ms(value) {
  if (value >= 1000) return `${+(value / 1000).toPrecision(3)} s`;
  return value >= 100 ? `${value.toFixed(0)} ms` : `${+value.toPrecision(3)} ms`;
}
const count = value => value >= 1000 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(3)}`;
const seconds = value => `${+(value / 1000).toFixed(2)} s`;

const tip = make("div", { id: "tip", role: "status" });
function showTip(event, text) {
  tip.textContent = text;
  tip.style.visibility = text ? "visible" : "hidden";
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, event.clientY - height - 10)}px`;
}

// --- scales and axes

function linear(low, high, from, to) {
  const span = high - low || 1;
  const scale = value => from + (value - low) / span * (to - from);
  scale.invert = at => low + (at - from) / (to - from) * span;
  const step = niceStep(span / 8);
  scale.ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) scale.ticks.push(tick);
  return scale;
}
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
}
function logarithmic(low, high, from, to) {
  const a = Math.log10(low), b = Math.log10(high);
  const scale = value => from + (Math.log10(Math.max(value, low)) - a) / (b - a || 1) * (to - from);
  scale.ticks = [];
  const factors = b - a > 4 ? [1] : b - a > 2 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(a); power <= b; power++)
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) scale.ticks.push(tick);
    }
  return scale;
}
// Percentiles so that each further nine takes the same room.
function nines(high, from, to) {
  const depth = value => Math.log10(100 / (100 - Math.min(value, 99.999)));
  const scale = value => from + depth(value) / depth(high) * (to - from);
  scale.ticks = PERCENTILES.filter(value => value <= high);
  return scale;
}
function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value > 0 && value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [1, 10];
}

// --- one chart: a card with a canvas that is drawn anew whenever its size, the theme or the range changes

const charts = [];
let range = null; // of all charts over time, in ms; null is everything

function chart({ title, note, series = [], wide = false, height = 260, overTime = false, draw, hover }) {
  const canvas = make("canvas", { role: "img", "aria-label": `${title}. ${note}` });
  const legend = make("div", { class: "legend" });
  const hidden = new Set();
  const self = { hit: null };
  for (const { name, color } of series) {
    const swatch = make("i");
    swatch.style.background = `var(${color})`;
    const button = make("button", { type: "button", "aria-pressed": "true" }, swatch, name);
    button.onclick = () => {
      if (!hidden.delete(name)) hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      self.redraw();
    };
    legend.append(button);
  }
  self.redraw = () => {
    const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    self.hit = draw(pen, { left: 58, right: width - 12, top: 8, bottom: height - 24, width, height },
      series.filter(s => !hidden.has(s.name)));
  };
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect();
    if (drag && drag.canvas === canvas) { drag.to = event.clientX - box.left; shade(canvas, drag); return; }
    showTip(event, hover && self.hit ? hover(self.hit, event.clientX - box.left, event.clientY - box.top) : "");
  });
  canvas.addEventListener("pointerleave", event => showTip(event, ""));
  let drag = null;
  if (overTime) {
    canvas.addEventListener("pointerdown", event => {
      if (event.pointerType === "touch") return;
      const from = event.clientX - canvas.getBoundingClientRect().left;
      drag = { canvas, from, to: from };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => {
      if (drag && self.hit && Math.abs(drag.to - drag.from) > 8) {
        const ends = [self.hit.x.invert(drag.from), self.hit.x.invert(drag.to)].sort((a, b) => a - b);
        range = ends;
        redrawAll();
      }
      drag = null;
    });
    canvas.addEventListener("dblclick", () => { range = null; redrawAll(); });
  }
  function shade(canvas, { from, to }) {
    self.redraw();
    const pen = canvas.getContext("2d");
    pen.globalAlpha = 0.15;
    pen.fillStyle = css("--a");
    pen.fillRect(Math.min(from, to), 0, Math.abs(to - from), height);
    pen.globalAlpha = 1;
  }
  charts.push(self);
  const body = [make("h2", {}, title), make("p", { class: "note" }, note)];
  if (series.length > 1) body.push(legend);
  return make("section", { class: wide ? "card wide" : "card" }, ...body, canvas);
}
function redrawAll() { for (const each of charts) each.redraw(); }

function axes(pen, area, x, y, formatX, formatY) {
  pen.strokeStyle = css("--line");
  pen.fillStyle = css("--soft");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const tick of y.ticks) {
    const at = Math.round(y(tick)) + 0.5;
    line(pen, area.left, at, area.right, at);
    pen.fillText(formatY(tick), area.left - 6, at);
  }
  pen.textBaseline = "top";
  let end = -Infinity;
  for (const tick of x.ticks) {
    const label = formatX(tick), half = pen.measureText(label).width / 2;
    const at = Math.min(Math.max(x(tick), half + 2), area.width - half - 2);
    if (at - half < end + 8) continue;
    end = at + half;
    pen.textAlign = "center";
    pen.fillText(label, at, area.bottom + 7);
  }
}
function line(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}
function path(pen, points, color) {
  pen.strokeStyle = color;
  pen.lineWidth = 2;
  pen.lineJoin = "round";
  pen.beginPath();
  points.forEach(([x, y], number) => number ? pen.lineTo(x, y) : pen.moveTo(x, y));
  pen.stroke();
}
function clipped(pen, area, work) {
  pen.save();
  pen.beginPath();
  pen.rect(area.left, area.top - 4, area.right - area.left, area.bottom - area.top + 4);
  pen.clip();
  work();
  pen.restore();
}

// --- the charts of a run

function runCharts() {
  const requests = data.requests, end = data.end_ms;
  const timeRange = () => range || [0, end];
  const seen = request => {
    const [from, to] = timeRange();
    return request[0] + request[3] >= from && request[0] <= to;
  };
  const latencies = {
    "TTFT, intended": r => r[2], "TTFT, from send": r => r[2] < 0 ? -1 : r[2] - r[1],
    "E2E, intended": r => r[5] === 0 ? r[3] : -1, "E2E, from send": r => r[5] === 0 ? r[3] - r[1] : -1,
  };
  const colors = { "TTFT, intended": "--a", "TTFT, from send": "--d", "E2E, intended": "--b", "E2E, from send": "--c" };
  const series = Object.keys(latencies).map(name => ({ name, color: colors[name], of: latencies[name] }));
  const describe = r => [
    `request ${r[7]}${r[6] >= 0 ? `, ${data.parts[r[6]]}` : ""}: ${data.statuses[r[5]]}`,
    `due at ${seconds(r[0])}${r[1] >= 0 ? `, sent ${ms(r[1])} later` : ", never sent"}`,
    r[2] >= 0 ? `first content after ${ms(r[2])}` : "no content",
    `end after ${ms(r[3])}, ${r[4]} tokens`,
  ].join("\n");

  const overTime = chart({
    title: "Latency over time", wide: true, overTime: true, height: 320,
    note: "One dot a request, at its intended time. Where a server stalls, latency from the send leaves out the wait. "
      + "Drag to look closer, double-click to see everything; click a name to hide it.",
    series,
    draw(pen, area, shown) {
      const inside = requests.filter(r => r[0] >= timeRange()[0] && r[0] <= timeRange()[1]);
      const [low, high] = bounds(function* () { for (const r of inside) for (const s of shown) { const v = s.of(r); if (v > 0) yield v; } }());
      const x = linear(...timeRange(), area.left, area.right), y = logarithmic(low / 1.2, high * 1.2, area.bottom, area.top);
      axes(pen, area, x, y, seconds, ms);
      const dots = [];
      clipped(pen, area, () => {
        for (const s of shown) {
          pen.fillStyle = css(s.color);
          pen.globalAlpha = inside.length > 2000 ? 0.45 : 0.75;
          const size = inside.length > 2000 ? 2.2 : 4;
          for (const r of inside) {
            const value = s.of(r);
            if (value <= 0) continue;
            const px = x(r[0]), py = y(value);
            pen.fillRect(px - size / 2, py - size / 2, size, size);
            dots.push([px, py, r]);
          }
        }
        pen.globalAlpha = 1;
        pen.fillStyle = css("--bad");
        for (const r of inside) if (r[5] > 1) { pen.fillRect(x(r[0]) - 1, area.bottom - 7, 2, 7); dots.push([x(r[0]), area.bottom - 3, r]); }
      });
      return { x, dots };
    },
    hover({ dots }, px, py) {
      let best = null, distance = 144;
      for (const [x, y, r] of dots) {
        const d = (x - px) ** 2 + (y - py) ** 2;
        if (d < distance) [best, distance] = [r, d];
      }
      return best ? describe(best) : "";
    },
  });

  const bins = data.bins;
  const throughput = chart({
    title: "Throughput and load", overTime: true,
    note: "Output tokens a second (left) and requests that were due and not yet answered (dashed, own scale).",
    series: [{ name: "tokens/s", color: "--c" }, { name: "open requests", color: "--b" }],
    draw(pen, area, shown) {
      const x = linear(...timeRange(), area.left, area.right);
      const y = linear(0, Math.max(...bins.tokens_per_s, 1) * 1.05, area.bottom, area.top);
      const most = Math.max(...bins.open, 1), z = linear(0, most * 1.05, area.bottom, area.top);
      axes(pen, area, x, y, seconds, count);
      const at = number => x((number + 0.5) * bins.width_ms);
      clipped(pen, area, () => {
        if (shown.some(s => s.name === "tokens/s"))
          path(pen, bins.tokens_per_s.map((value, number) => [at(number), y(value)]), css("--c"));
        if (shown.some(s => s.name === "open requests")) {
          pen.setLineDash([5, 4]);
          path(pen, bins.open.map((value, number) => [at(number), z(value)]), css("--b"));
          pen.setLineDash([]);
          pen.fillStyle = css("--b");
          pen.textAlign = "right";
          pen.textBaseline = "top";
          pen.fillText(`most open: ${count(most)}`, area.right - 4, area.top);
        }
      });
      return { x };
    },
    hover({ x }, px) {
      const number = Math.floor(x.invert(px) / bins.width_ms);
      if (!(number in bins.open)) return "";
      return `${seconds(number * bins.width_ms)}: ${count(bins.tokens_per_s[number])} tokens/s, ${count(bins.open[number])} open`;
    },
  });

  const against = chart({
    title: "Throughput against latency",
    note: "One dot a slice of the run: tokens a second in it, median E2E (intended) of the requests due in it.",
    draw(pen, area) {
      const points = bins.tokens_per_s.map((value, number) => [value, bins.e2e_ms[number], number]).filter(p => p[0] > 0 && p[1] > 0);
      const x = linear(0, Math.max(1, ...points.map(p => p[0])) * 1.05, area.left, area.right);
      const [low, high] = bounds(points.map(p => p[1]));
      const y = logarithmic(low / 1.2, high * 1.2, area.bottom, area.top);
      axes(pen, area, x, y, count, ms);
      pen.fillStyle = css("--a");
      pen.globalAlpha = 0.7;
      const dots = points.map(([rate, latency, number]) => {
        pen.beginPath();
        pen.arc(x(rate), y(latency), 3.5, 0, 7);
        pen.fill();
        return [x(rate), y(latency), `${seconds(number * bins.width_ms)}: ${count(rate)} tokens/s, E2E p50 ${ms(latency)}`];
      });
      pen.globalAlpha = 1;
      return { dots };
    },
    hover: nearestText,
  });

  const good = requests.filter(r => r[5] === 0);
  const quantile = (ascending, q) => {
    const position = (ascending.length - 1) * q / 100, low = Math.floor(position);
    return ascending[low] + ((ascending[low + 1] ?? ascending[low]) - ascending[low]) * (position - low);
  };
  const sorted = {};
  for (const s of series) sorted[s.name] = Float64Array.from(good.map(s.of).filter(v => v >= 0)).sort();
  const percentiles = chart({
    title: "Distributions", series,
    note: "Latency by percentile; each further nine takes the same room. The gap between the two TTFT curves is the queue before the send.",
    draw(pen, area, shown) {
      const most = Math.max(...shown.map(s => sorted[s.name].length), 2);
      const deepest = PERCENTILES.filter(p => (100 - p) / 100 * most >= 0.9).at(-1) ?? 50;
      const high = Math.max(deepest, 90);
      const x = nines(high, area.left, area.right);
      const curves = shown.filter(s => sorted[s.name].length).map(s => [s, sorted[s.name]]);
      const [low, top] = bounds(curves.flatMap(([, v]) => [Math.max(v[0], 1e-3), v[v.length - 1]]));
      const y = logarithmic(low / 1.2, top * 1.2, area.bottom, area.top);
      axes(pen, area, x, y, p => p === 0 ? "min" : `p${p}`, ms);
      clipped(pen, area, () => {
        for (const [s, values] of curves) {
          const points = [];
          for (let step = 0; step <= 240; step++) {
            const p = 100 - 100 * 10 ** (-step / 240 * Math.log10(100 / (100 - high)));
            points.push([x(p), y(Math.max(quantile(values, p), low / 1.2))]);
          }
          path(pen, points, css(s.color));
        }
      });
      return { curves, invert: px => 100 - 100 * 10 ** (-(px - area.left) / (area.right - area.left) * Math.log10(100 / (100 - high))) };
    },
    hover({ curves, invert }, px) {
      const p = Math.min(Math.max(invert(px), 0), 99.999);
      return [`p${p.toFixed(p > 99 ? 2 : 1)}`, ...curves.map(([s, v]) => `${s.name}: ${ms(quantile(v, p))}`)].join("\n");
    },
  });

  const gapSeries = [
    { name: "inter-token", color: "--a" }, { name: "inter-chunk", color: "--b" }, { name: "TPOT", color: "--c" },
  ].filter(s => data.quantiles[s.name]);
  const gaps = chart({
    title: "Between tokens", series: gapSeries,
    note: "Inter-token shares a chunk's gap out to its tokens, inter-chunk does not; TPOT is a request's mean.",
    draw(pen, area, shown) {
      const marks = data.quantiles.at, high = marks.at(-1);
      const x = nines(high, area.left, area.right);
      const [low, top] = bounds(shown.flatMap(s => data.quantiles[s.name].filter(v => v > 0.005)));
      const y = logarithmic(low / 1.2, top * 1.2, area.bottom, area.top);
      axes(pen, area, x, y, p => p === 0 ? "min" : `p${p}`, ms);
      clipped(pen, area, () => {
        for (const s of shown)
          path(pen, data.quantiles[s.name].map((value, number) => [x(marks[number]), y(value)]), css(s.color));
      });
      return { marks, shown, x };
    },
    hover({ marks, shown, x }, px) {
      let best = 0;
      marks.forEach((mark, number) => { if (Math.abs(x(mark) - px) < Math.abs(x(marks[best]) - px)) best = number; });
      return [`p${+marks[best].toFixed(2)}`, ...shown.map(s => `${s.name}: ${ms(data.quantiles[s.name][best])}`)].join("\n");
    },
  });

  const rows = layRows(requests);
  const timeline = chart({
    title: "Timeline of requests", wide: true, overTime: true,
    height: Math.max(120, Math.min(520, rows.count * 7 + 40)),
    note: "A bar a request, on the first row that is free: waiting to be sent, waiting for its first token, reading tokens.",
    series: [
      { name: "not yet sent", color: "--b" }, { name: "first token", color: "--a" },
      { name: "tokens", color: "--c" }, { name: "failed", color: "--bad" },
    ],
    draw(pen, area, shown) {
      const x = linear(...timeRange(), area.left, area.right), y = linear(0, rows.count, area.top, area.bottom);
      y.ticks = y.ticks.filter(Number.isInteger);
      axes(pen, area, x, y, seconds, count);
      const names = new Set(shown.map(s => s.name));
      const thick = Math.max(1, Math.min(14, (area.bottom - area.top) / rows.count - 1));
      clipped(pen, area, () => {
        requests.forEach((r, number) => {
          if (!seen(r)) return;
          const top = y(rows.of[number]);
          const bar = (from, to, name, color) => {
            if (!names.has(name) || to <= from) return;
            pen.fillStyle = color;
            pen.fillRect(x(r[0] + from), top, Math.max(0.7, x(r[0] + to) - x(r[0] + from)), thick);
          };
          if (r[5] > 1) { bar(0, r[3], "failed", css("--bad")); return; }
          const sent = Math.max(r[1], 0), first = r[2] < 0 ? r[3] : r[2];
          bar(0, sent, "not yet sent", css("--b"));
          bar(sent, first, "first token", css("--a"));
          bar(first, r[3], "tokens", css("--c"));
        });
      });
      return { x, y };
    },
    hover({ x, y }, px, py) {
      const row = Math.floor(y.invert(py)), at = x.invert(px);
      const number = requests.findIndex((r, i) => rows.of[i] === row && r[0] <= at && at <= r[0] + r[3]);
      return number < 0 ? "" : describe(requests[number]);
    },
  });
  return [overTime, throughput, against, percentiles, ...(gapSeries.length ? [gaps] : []), timeline];
}

function nearestText({ dots }, px, py) {
  let best = "", distance = 200;
  for (const [x, y, text] of dots) {
    const d = (x - px) ** 2 + (y - py) ** 2;
    if (d < distance) [best, distance] = [text, d];
  }
  return best;
}

function layRows(requests) {
  const ends = [], of = new Array(requests.length);
  const order = requests.map((_, number) => number).sort((a, b) => requests[a][0] - requests[b][0]);
  for (const number of order) {
    const r = requests[number];
    let row = ends.findIndex(end => end <= r[0]);
    if (row < 0) row = ends.length;
    ends[row] = r[0] + r[3];
    of[number] = row;
  }
  return { of, count: Math.max(1, ends.length) };
}

// --- the chart of a sweep

function sweepCharts() {
  const latencies = [["TTFT p50", "--a"], ["TTFT p99", "--d"], ["E2E p50", "--b"]];
  const card = (title, note, across, format) => chart({
    title, note, height: 340, series: latencies.map(([name, color]) => ({ name, color })),
    draw(pen, area, shown) {
      const points = data.points.filter(p => p.tokens_per_s > 0);
      const x = linear(0, Math.max(1, ...points.map(across)) * 1.08, area.left, area.right);
      const [low, high] = bounds(points.flatMap(p => shown.map(s => p[s.name] || 0)));
      const y = logarithmic(low / 1.3, high * 1.3, area.bottom, area.top);
      axes(pen, area, x, y, format, ms);
      const dots = [];
      for (const s of shown) {
        const own = points.filter(p => p[s.name] > 0);
        path(pen, own.map(p => [x(across(p)), y(p[s.name])]), css(s.color));
        for (const p of own) {
          pen.fillStyle = p.holds ? css(s.color) : css("--bad");
          pen.beginPath();
          pen.arc(x(across(p)), y(p[s.name]), 4, 0, 7);
          pen.fill();
          dots.push([x(across(p)), y(p[s.name]), `${p.load} ${data.unit}: ${count(p.tokens_per_s)} tokens/s\n${s.name} ${ms(p[s.name])}\n${p.note}`]);
        }
      }
      pen.fillStyle = css("--ink");
      pen.textBaseline = "top";
      for (const [mark, label] of [[data.best, "highest that holds"], [data.knee, "knee"]]) {
        const point = points.find(p => p.load === mark);
        if (!point) continue;
        const at = x(across(point)), row = label === "knee" ? 16 : 0, wide = pen.measureText(label).width;
        pen.strokeStyle = css("--soft");
        pen.setLineDash([3, 3]);
        line(pen, at, area.top + row, at, area.bottom);
        pen.setLineDash([]);
        const isRight = at + wide + 10 > area.right;
        pen.textAlign = isRight ? "right" : "left";
        pen.fillText(label, at + (isRight ? -5 : 5), area.top + row);
      }
      return { dots };
    },
    hover: nearestText,
  });
  return [
    card("Throughput against latency", "A dot a load; red ones break a limit or are not kept up with.", p => p.tokens_per_s, count),
    card("Load against latency", `The same over the load, in ${data.unit}.`, p => p.load, count),
  ];
}

// --- the page

function table(title, note, head, rows, { wide = false } = {}) {
  const body = rows.map(row => make("tr", row.marked ? { class: "marked" } : {}, ...row.cells.map((cell, number) =>
    make("td", row.words === number ? { class: "words" } : {}, cell))));
  const whole = make("table", {}, make("thead", {}, make("tr", {}, ...head.map(text => make("th", {}, text)))), make("tbody", {}, ...body));
  const noted = note ? [make("p", { class: "note" }, note)] : [];
  return make("section", { class: wide ? "card wide" : "card" }, make("h2", {}, title), ...noted, make("div", { class: "scroll" }, whole));
}

root.append(make("header", {}, make("h1", {}, data.title), ...data.lines.map(text => make("p", {}, text)),
  ...data.alarms.map(text => make("p", { class: "alarm" }, text))));
root.append(make("div", { class: "tiles" }, ...data.tiles.map(([value, label, bad]) =>
  make("div", { class: bad ? "tile bad" : "tile" }, make("b", {}, value), make("span", {}, label)))));
const cards = make("div", { class: "cards" }, ...(data.requests ? runCharts() : sweepCharts()));
for (const { title, note, head, rows, wide } of data.tables) cards.append(table(title, note, head, rows, { wide }));
const facts = data.facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
cards.append(make("section", { class: "card wide" }, make("h2", {}, "How it was measured"), make("dl", {}, ...facts)));
root.append(cards, tip);
new ResizeObserver(redrawAll).observe(root);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
redrawAll();
