"use strict";
// Sorting, filter, column groups and copied commands. Without this script every row and column is on the page.

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const compareText = new Intl.Collator("en", {numeric: true}).compare;

// Numbers by value, before texts; a cell without a value comes last in both directions.
function compareCells(one, other, direction) {
  if (one.text === "" || other.text === "") return (one.text === "") - (other.text === "");
  const numbers = (other.number !== null) - (one.number !== null);
  if (numbers) return numbers;
  return direction * (one.number !== null ? one.number - other.number : compareText(one.text, other.text));
}

function cellOf(row, index) {
  const cell = row.cells[index];
  const number = "sort" in cell.dataset ? Number(cell.dataset.sort) : null;
  return {row, number, text: cell.textContent.trim()};
}

function addSorting(table, rows) {
  const headers = [...table.tHead.rows[0].cells];
  const order = {ascending: "descending", descending: null};
  headers.forEach((header, index) => {
    if (header.classList.contains("plain")) return;
    const button = make("button", header.textContent, {type: "button"});
    header.replaceChildren(button);
    button.addEventListener("click", () => {
      const current = header.getAttribute("aria-sort");
      const next = current === null ? "ascending" : order[current];
      for (const each of headers) each.removeAttribute("aria-sort");
      let sorted = rows;
      if (next !== null) {
        header.setAttribute("aria-sort", next);
        const direction = next === "ascending" ? 1 : -1;
        sorted = rows.map((row) => cellOf(row, index)).sort((a, b) => compareCells(a, b, direction)).map((a) => a.row);
      }
      table.tBodies[0].append(...sorted);
    });
  });
}

function addFilter(tools, rows, title) {
  const field = make("input", "", {type: "search", placeholder: "Filter rows", "aria-label": `Filter rows of: ${title}`});
  const count = make("output", "");
  const texts = rows.map((row) => row.textContent.toLowerCase());
  function apply() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, index) => {
      row.hidden = !words.every((word) => texts[index].includes(word));
      shown += !row.hidden;
    });
    count.textContent = words.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
  }
  field.addEventListener("input", apply);
  apply();
  tools.prepend(field, count);
}

function addGroups(tools, table) {
  const headers = [...table.tHead.rows[0].cells];
  const names = [...new Set(headers.map((header) => header.dataset.group).filter(Boolean))];
  if (names.length < 3) return;
  const box = make("span", "", {class: "groups", role: "group", "aria-label": "Columns shown"});
  for (const name of names) {
    const places = headers.flatMap((header, index) => (header.dataset.group === name ? [index] : []));
    const button = make("button", name, {type: "button"});
    const show = (shown) => {
      button.setAttribute("aria-pressed", String(shown));
      for (const row of table.rows) for (const place of places) row.cells[place].hidden = !shown;
    };
    button.addEventListener("click", () => show(button.getAttribute("aria-pressed") !== "true"));
    show(name !== "provenance");
    box.append(button);
  }
  tools.insertBefore(box, tools.querySelector(".file"));
}

// The command is copied where the browser allows it, and shown in any case where it does not.
function addCopy(details) {
  const command = details.querySelector("code").textContent;
  const button = make("button", "copy", {type: "button", class: "copy", title: command});
  const show = () => {
    details.hidden = false;
    details.open = true;
    getSelection().selectAllChildren(details.querySelector("code"));
  };
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    } catch {
      show();
    }
  });
  details.hidden = true;
  details.before(button);
}

for (const block of document.querySelectorAll(".grid")) {
  const table = block.querySelector("table");
  const tools = block.querySelector(".tools");
  const rows = [...table.tBodies[0].rows];
  if (rows.length > 8) addFilter(tools, rows, block.dataset.title);
  addGroups(tools, table);
  if (rows.length > 1) addSorting(table, rows);
  table.querySelectorAll("details.command").forEach(addCopy);
}
for (const link of document.querySelectorAll(".top a")) {
  link.addEventListener("click", () => { link.closest("details").open = false; });
}
