// Tables that sort, filter and hide groups of columns (DataTables, above), and commands that are copied. Without this
// script every row and column is on the page.

const compareText = new Intl.Collator("en", {numeric: true}).compare;
const isNumber = (text) => text.trim() !== "" && !Number.isNaN(Number(text));

// Numbers by value, before texts; a cell without a value comes last in both directions.
function compareCells(one, other, direction) {
  if (one === "" || other === "") return (one === "") - (other === "");
  if (isNumber(one) !== isNumber(other)) return isNumber(one) ? -1 : 1;
  return direction * (isNumber(one) ? Number(one) - Number(other) : compareText(one, other));
}
if (TableLibrary) {
  TableLibrary.ext.type.order["cell-asc"] = (one, other) => compareCells(one, other, 1);
  TableLibrary.ext.type.order["cell-desc"] = (one, other) => compareCells(one, other, -1);
}

// A button for each group of columns; those of provenance are hidden at first.
function groupButtons(table) {
  const headers = [...table.tHead.rows[0].cells];
  const names = [...new Set(headers.map((header) => header.dataset.group).filter(Boolean))];
  if (names.length < 3) return [];
  return names.map((name) => {
    const places = headers.flatMap((header, index) => (header.dataset.group === name ? [index] : []));
    const show = (button, shown) => {
      button.active(shown);
      button.node().attr("aria-pressed", String(shown));
    };
    return {
      text: name,
      init(api) {
        if (name === "provenance") api.columns(places).visible(false);
        show(this, name !== "provenance");
      },
      action(event, api) {
        const shown = !this.active();
        api.columns(places).visible(shown);
        show(this, shown);
      },
    };
  });
}

// The command is copied where the browser allows it, and shown in any case where it does not.
function addCopy(details) {
  const command = details.querySelector("code").textContent;
  const button = document.createElement("button");
  Object.assign(button, {type: "button", className: "copy", title: command, textContent: "copy"});
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "copied";
    } catch {
      details.hidden = false;
      details.open = true;
      getSelection().selectAllChildren(details.querySelector("code"));
    }
  });
  details.hidden = true;
  details.before(button);
}

for (const block of document.querySelectorAll(".grid")) {
  const table = block.querySelector("table");
  const rows = table.tBodies[0].rows.length;
  table.querySelectorAll("details.command").forEach(addCopy);
  if (rows < 2 || !TableLibrary) continue;
  const filter = rows > 8 ? {search: {placeholder: "Filter rows", text: ""}} : null;
  const buttons = groupButtons(table);
  new TableLibrary(table, {
    autoWidth: false, order: [], paging: false,
    columnDefs: [{targets: "_all", type: "cell"}],
    language: {info: "_TOTAL_ rows", infoEmpty: "0 rows", infoFiltered: "of _MAX_", zeroRecords: "No row has these words."},
    layout: {
      topStart: filter, top2Start: null, topEnd: buttons.length ? {buttons} : null,
      bottomStart: filter ? "info" : null, bottomEnd: null,
    },
  });
  const box = block.querySelector(".box");
  const scrolled = block.querySelector(".dt-layout-table");
  for (const name of ["tabindex", "role", "aria-label"]) {
    scrolled.setAttribute(name, box.getAttribute(name));
    box.removeAttribute(name);
  }
  box.classList.remove("box");
  scrolled.classList.add("box");
}
for (const link of document.querySelectorAll(".top a")) {
  link.addEventListener("click", () => { link.closest("details").open = false; });
}
