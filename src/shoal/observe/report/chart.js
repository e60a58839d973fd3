// Line and stacked charts in SVG. Charts of one group share what is zoomed to, the x axis and the settings.

const MARGIN = { top: 10, right: 12, bottom: 24 };
const allCharts = [];
let chartCount = 0;

function makeGroup() {
  const group = { by: "step", zoom: null, log: false, smooth: 0, cursor: null, charts: [], onZoom: [] };
  group.redraw = () => group.charts.forEach((chart) => chart.draw());
  group.zoomTo = (range) => { group.zoom = range; group.onZoom.forEach((call) => call(range)); group.redraw(); };
  group.pointAt = (x, from) => { group.cursor = x; group.charts.forEach((chart) => chart.point(x, chart === from)); };
  return group;
}

function niceTicks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || 10 * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function timeTicks(low, high, count) {
  const raw = (high - low) / count;
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800].find((s) => s >= raw * 0.75);
  if (!step || raw < 0.5) return niceTicks(low, high, count);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
  return ticks;
}

function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.max(1, Math.ceil((to - from) / 5));
  const within = (ticks) => ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  const powers = [];
  for (let p = from; p <= to; p += every) powers.push(10 ** p);
  if (within(powers).length > 2) return within(powers);
  const finer = within(powers.flatMap((p) => [p, 2 * p, 5 * p]));
  return finer.length > 1 ? finer : niceTicks(low, high, 3);
}

// A mean over what is around, twice; as wide as that share of all points, so that few points stay as they are. Near the
// ends it is narrower, so as to lean to one side but a little. What is not a number stays a gap.
function smoothed(values, width) {
  const reach = Math.floor((values.length * width) / 2);
  const once = (list) => {
    const sums = [0], counts = [0];
    list.forEach((value, i) => { sums.push(sums[i] + (value ?? 0)); counts.push(counts[i] + (value !== null)); });
    return list.map((value, i) => {
      const near = Math.max(Math.min(reach, i, list.length - 1 - i), Math.floor(reach / 3)), from = Math.max(i - near, 0), to = Math.min(i + near + 1, list.length);
      return value === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  };
  return reach ? once(once(values)) : values;
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// spec: {label, series: [{name, color, step, time, value, dash, faint}], format, stacked, marks, height, zero, most: the most that can be, exact: never smoothed}
function makeChart(spec, group) {
  const id = "clip-" + ++chartCount;
  const host = el("div", { class: "chart", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": spec.label });
  const tip = el("div", { class: "tip", "aria-live": "polite", hidden: true });
  const chart = { host, spec, group, size: null, scale: null };
  let picture = null, pressed = null, tipPlace = null;
  const axis = (series) => series[group.by] || series.step;
  // On an axis, without the zeros that a column of values would keep.
  const tick = (value) => spec.format(value).replace(/(\.\d*?)0+(?= |%|$)/, "$1").replace(/\.(?= |%|$)/, "");
  const xFormat = (x) => (group.by === "time" ? duration(x) : "step " + grouped(x, 0));

  function ranges(shown, ys) {
    let [left, right] = [Infinity, -Infinity];
    for (const s of shown) for (const x of axis(s)) if (x !== null) { left = Math.min(left, x); right = Math.max(right, x); }
    if (!(right > left)) { left -= 0.5; right += 0.5; }
    const full = [left, right];
    if (group.zoom) [left, right] = group.zoom;
    let [low, high] = [Infinity, -Infinity], positive = Infinity;
    shown.forEach((s, i) => axis(s).forEach((x, j) => {
      const y = ys[i][j];
      if (x === null || y === null || x < left || x > right) return;
      const raw = spec.stacked ? y : s.value[j];
      low = Math.min(low, y, raw); high = Math.max(high, y, raw);
      if (raw > 0) positive = Math.min(positive, raw);
    }));
    if (low > high) [low, high] = [0, 1];
    const log = group.log && !spec.stacked && positive < Infinity;
    if (log) low = positive;
    else if (spec.stacked || spec.zero) low = Math.min(0, low);
    if (log) { const pad = Math.max((high / low) ** 0.06, 1.02); low /= pad; high *= pad; }
    else { const pad = (high - low || Math.abs(high) || 1) * 0.06; if (low !== 0) low -= pad; high += pad; }
    if (spec.most !== undefined && high > spec.most) high = Math.max(spec.most, high - (high - low) * 0.0566);
    return { left, right, low, high, log, full };
  }

  function draw(forced) {
    const width = forced || host.clientWidth || 600, height = spec.height || 210;
    const shown = spec.series, isSmooth = group.smooth > 0 && !spec.exact;
    const ys = spec.stacked ? stack(shown) : shown.map((s) => (isSmooth ? smoothed(s.value, group.smooth) : s.value));
    const r = ranges(shown, ys);
    const yTicks = r.log ? logTicks(r.low, r.high) : niceTicks(r.low, r.high, 4);
    const inner = { left: 14 + 6.4 * Math.max(3, ...yTicks.map((t) => tick(t).length)), right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const X = (x) => inner.left + ((x - r.left) / (r.right - r.left)) * (inner.right - inner.left);
    const f = r.log ? Math.log : (v) => v;
    const Y = (y) => inner.bottom - ((f(y) - f(r.low)) / (f(r.high) - f(r.low))) * (inner.bottom - inner.top);
    chart.scale = { X, Y, ...r, inner, ys, log: r.log };
    const count = Math.max(2, Math.floor((inner.right - inner.left) / 90));
    const xTicks = (group.by === "time" ? timeTicks : niceTicks)(r.left, r.right, count);
    const next = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
      svg("clipPath", { id }, svg("rect", { x: inner.left - 4, y: 0, width: Math.max(inner.right - inner.left + 8, 0), height: inner.bottom + 4 })),
      yTicks.map((t) => [svg("line", { class: "rule", x1: inner.left, x2: inner.right, y1: Y(t), y2: Y(t) }),
        svg("text", { class: "tick", x: inner.left - 6, y: Y(t) + 3.5, "text-anchor": "end" }, tick(t))]),
      xTicks.map((t) => svg("text", { class: "tick", x: X(t), y: height - 7, "text-anchor": X(t) > inner.right - 20 ? "end" : "middle" },
        group.by === "time" ? duration(t) : plain(t))),
      svg("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }),
      svg("g", { "clip-path": `url(#${id})` },
        spec.stacked ? shown.map((s, i) => area(s, ys, i)) : shown.map((s, i) => lines(s, ys[i], isSmooth)),
        (spec.marks || []).map((mark) => svg("line", { class: "mark", x1: X(mark[group.by]), x2: X(mark[group.by]), y1: inner.top, y2: inner.bottom }))),
      svg("g", { class: "cursor" }), svg("rect", { class: "selection", hidden: true, y: inner.top, height: inner.bottom - inner.top }));
    if (picture) picture.replaceWith(next); else host.prepend(next);
    picture = next;
    if (group.cursor !== null) chart.point(group.cursor, !tip.hidden);
  }

  function stack(series) {
    const below = series[0].value.map(() => 0);
    return series.map((s) => s.value.map((v, i) => (below[i] += v || 0)));
  }

  function path(xs, values) {
    const { X, Y, log } = chart.scale;
    let text = "", pen = false;
    xs.forEach((x, i) => {
      const y = values[i];
      if (x === null || y === null || y === undefined || (log && y <= 0)) { pen = false; return; }
      text += (pen ? "L" : "M") + X(x).toFixed(1) + " " + Y(y).toFixed(1);
      pen = true;
    });
    return text;
  }

  function lines(s, values, isSmooth) {
    const xs = axis(s), { X, Y, log } = chart.scale, drawn = [];
    if (isSmooth) drawn.push(svg("path", { class: "line raw", d: path(xs, s.value), style: { stroke: s.color } }));
    drawn.push(svg("path", { class: "line" + (s.faint ? " faint" : ""), d: path(xs, values), "stroke-dasharray": s.dash, style: { stroke: s.color } }));
    if (values.length <= 40)
      values.forEach((y, i) => y !== null && xs[i] !== null && (!log || y > 0) && drawn.push(svg("circle", { class: "dot", cx: X(xs[i]), cy: Y(y), r: values.length < 12 ? 3 : 2, style: { fill: s.color } })));
    return svg("g", { class: "series" }, drawn);
  }

  function area(s, sums, i) {
    const xs = axis(s), { X, Y } = chart.scale, base = i ? sums[i - 1] : sums[0].map(() => 0);
    const at = (values) => xs.map((x, j) => [x, values[j]]).filter(([x]) => x !== null);
    const there = at(sums[i]), back = at(base).reverse();
    if (there.length === 1) { // one report: as a bar over the whole width
      const { inner } = chart.scale, y1 = Y(there[0][1]), y0 = Y(back[0][1]);
      return svg("rect", { class: "area", x: inner.left, width: inner.right - inner.left, y: y1, height: Math.max(y0 - y1, 0), style: { fill: s.color } });
    }
    const corner = ([x, y], j) => (j ? "L" : "M") + X(x).toFixed(1) + " " + Y(y).toFixed(1);
    return svg("path", { class: "area", d: there.concat(back).map(corner).join("") + "Z", style: { fill: s.color } });
  }

  // The values at x: a line and dots in every chart of the group, words in the one that is pointed at.
  chart.point = (x, isHere) => {
    const { X, Y, inner, left, right, ys, log } = chart.scale;
    const cursor = picture.querySelector(".cursor");
    cursor.replaceChildren();
    if (x === null || x < left || x > right) { tip.hidden = true; return; }
    const found = [];
    spec.series.forEach((s, i) => {
      const known = axis(s).map((at, j) => [at, j]).filter(([at, j]) => at !== null && s.value[j] !== null && at >= left && at <= right);
      if (!known.length) return;
      const [at, j] = known[nearest(known.map((pair) => pair[0]), x)];
      found.push({ s, at, value: s.value[j], y: ys[i][j] });
    });
    if (!found.length) { tip.hidden = true; return; }
    const at = found.reduce((a, b) => (Math.abs(b.at - x) < Math.abs(a.at - x) ? b : a)).at;
    cursor.append(svg("line", { class: "cross", x1: X(at), x2: X(at), y1: inner.top, y2: inner.bottom }));
    if (!spec.stacked) found.forEach(({ s, at: own, y }) => (!log || y > 0) && cursor.append(svg("circle", { class: "spot", cx: X(own), cy: Y(y), r: 4, style: { fill: s.color } })));
    if (!isHere) { tip.hidden = true; return; }
    if (tipPlace !== at || tip.hidden) {
      tipPlace = at;
      const rows = (spec.stacked ? found.slice().reverse() : found).map(({ s, value, at: own }) => el("div", { class: "tip-row" }, swatch(s.color), el("span", {}, s.name),
        el("b", {}, spec.format(value)), own !== at && el("small", {}, xFormat(own))));
      tip.replaceChildren(el("div", { class: "tip-head" }, xFormat(at)), ...rows);
      tip.hidden = false;
    }
    const scale = host.clientWidth / picture.viewBox.baseVal.width, place = X(at) * scale;
    const wide = tip.offsetWidth, beside = place + 12 + wide > host.clientWidth ? place - 12 - wide : place + 12;
    tip.style.left = Math.max(0, Math.min(beside, host.clientWidth - wide)) + "px";
  };

  function xOf(event) {
    const box = picture.getBoundingClientRect(), { inner, left, right } = chart.scale;
    const px = ((event.clientX - box.left) / box.width) * picture.viewBox.baseVal.width;
    return left + ((Math.min(Math.max(px, inner.left), inner.right) - inner.left) / (inner.right - inner.left)) * (right - left);
  }

  function select(from, to) {
    const { X } = chart.scale, box = picture.querySelector(".selection"), [a, b] = [X(Math.min(from, to)), X(Math.max(from, to))];
    if (b - a > 3) box.removeAttribute("hidden"); else box.setAttribute("hidden", "");
    box.setAttribute("x", a); box.setAttribute("width", b - a);
    return b - a;
  }

  function zoomBy(factor) {
    const { left, right, full } = chart.scale, at = group.cursor ?? (left + right) / 2;
    const [a, b] = [Math.max(full[0], at - (at - left) * factor), Math.min(full[1], at + (right - at) * factor)];
    group.zoomTo(a <= full[0] && b >= full[1] ? null : [a, b]);
  }

  function step(direction) {
    const { left, right } = chart.scale;
    const xs = [...new Set(spec.series.flatMap((s) => axis(s).filter((x) => x !== null && x >= left && x <= right)))].sort((a, b) => a - b);
    if (!xs.length) return;
    const place = group.cursor === null ? (direction > 0 ? -1 : xs.length) : nearest(xs, group.cursor);
    group.pointAt(xs[Math.min(Math.max(place + direction, 0), xs.length - 1)], chart);
  }

  host.addEventListener("pointermove", (event) => {
    if (pressed !== null) select(pressed, xOf(event));
    group.pointAt(xOf(event), chart);
  });
  host.addEventListener("pointerleave", () => { if (pressed === null) group.pointAt(null, chart); });
  host.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pressed = xOf(event);
    host.setPointerCapture(event.pointerId);
    group.pointAt(pressed, chart);
  });
  host.addEventListener("pointerup", (event) => {
    if (pressed === null) return;
    const from = pressed, to = xOf(event), wide = select(from, to);
    pressed = null;
    picture.querySelector(".selection").setAttribute("hidden", "");
    if (wide > 6) group.zoomTo([Math.min(from, to), Math.max(from, to)]);
  });
  host.addEventListener("pointercancel", () => { pressed = null; picture.querySelector(".selection").setAttribute("hidden", ""); });
  host.addEventListener("dblclick", () => group.zoomTo(null));
  host.addEventListener("keydown", (event) => {
    const act = { ArrowLeft: () => step(-1), ArrowRight: () => step(1), "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), Escape: () => { group.pointAt(null, chart); group.zoomTo(null); } }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  host.addEventListener("blur", () => group.pointAt(null, chart));

  host.append(tip);
  chart.draw = draw;
  group.charts.push(chart);
  allCharts.push(chart);
  return chart;
}

// Drawn when they are in the page, and again when their width changes or the page is printed.
function drawCharts() {
  allCharts.forEach((chart) => chart.draw());
  const widths = new Map();
  const watcher = new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
    if (contentRect.width && widths.get(target) !== contentRect.width) {
      widths.set(target, contentRect.width);
      allCharts.find((chart) => chart.host === target).draw();
    }
  }));
  allCharts.forEach((chart) => watcher.observe(chart.host));
}
