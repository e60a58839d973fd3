// Elements of the page. Texts only ever get in as text nodes, so that no name or message can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(9)) {
    if (child !== null && child !== undefined && child !== false)
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function section(id, title, note, ...children) {
  return el("section", { id, "aria-labelledby": id + "-title" },
    el("div", { class: "section-head" }, el("h2", { id: id + "-title" }, title), note && el("p", { class: "note" }, note)),
    ...children);
}

// columns: {label, number: bool, of: row -> text or node, class}. A number is set flush right in figures of equal width.
function table(label, columns, rows, rowClass) {
  const kind = (column) => [column.number ? "number" : "", column.class || ""].join(" ").trim() || null;
  return el("div", { class: "scroller", role: "region", "aria-label": label, tabindex: "0" },
    el("table", {},
      el("thead", {}, el("tr", {}, columns.map((c) => el("th", { scope: "col", class: kind(c), title: c.title }, c.label)))),
      el("tbody", {}, rows.map((row, place) => el("tr", { class: rowClass ? rowClass(row, place) : null },
        columns.map((c, i) => el(i ? "td" : "th", { scope: i ? null : "row", class: kind(c), style: c.style && c.style(row) },
          c.of(row, place))))))));
}

function details(summary, ...children) {
  return el("details", {}, el("summary", {}, summary), ...children);
}

const swatch = (color) => el("span", { class: "swatch", "aria-hidden": "true", style: { background: color } });
