// The tables are in the page; filters hide rows, cells and columns of them.
function filterTables(state, visible) {
  for (const part of document.querySelectorAll(".gpu")) part.hidden = part.dataset.gpu !== state.gpu;
  const part = document.querySelector(`.gpu[data-gpu="${CSS.escape(state.gpu)}"]`);
  filterHeatMap(part.querySelector(".heat"), visible);
  let shown = 0;
  for (const row of part.querySelectorAll(".peers tbody tr")) {
    row.hidden = !visible.has(row.dataset.case) || (!state.unpeered && "unpeered" in row.dataset);
    shown += !row.hidden;
  }
  part.querySelector(".empty").hidden = shown > 0;
  for (const row of part.querySelectorAll(".plain tbody tr")) row.hidden = !visible.has(row.dataset.case);
  const total = Object.keys(DATA[state.gpu].cases).length;
  document.getElementById("count").textContent = `${visible.size} of ${total} recorded cases; ${shown} in the table beside peers`;
}

function filterHeatMap(table, visible) {
  const used = new Set();
  for (const row of table.tBodies[0].rows) {
    let any = false;
    [...row.cells].forEach((cell, column) => {
      if (!("case" in cell.dataset)) return;
      const on = visible.has(cell.dataset.case);
      cell.firstElementChild.hidden = !on;
      if (on) used.add(column);
      any ||= on;
    });
    row.hidden = !any;
  }
  for (const row of table.rows) [...row.cells].forEach((cell, column) => (cell.hidden = column > 0 && !used.has(column)));
}
