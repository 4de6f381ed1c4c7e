"use strict";
(() => {
  const form = document.getElementById("filter");
  const query = document.getElementById("q");
  const shown = document.getElementById("shown");
  const nodes = [...document.querySelectorAll("details.node")];
  const hosts = nodes.map((node) => node.dataset.h.toLowerCase());
  const rows = [...document.querySelectorAll("tr[data-n]")];
  const checks = [...document.querySelectorAll("details.checkpage")];
  const texts = new Map();
  const textOf = (element) => {
    if (!texts.has(element)) texts.set(element, element.textContent.toLowerCase());
    return texts.get(element);
  };
  const numbers = (text) =>
    text.split(",").filter(Boolean).flatMap((part) => {
      const [first, last] = part.split("-").map(Number);
      return Array.from({ length: (last ?? first) - first + 1 }, (_, step) => first + step);
    });
  const off = (element, hidden) => element.toggleAttribute("data-off", hidden);

  const apply = () => {
    const words = query.value.trim().toLowerCase();
    const wanted = new Set([...form.querySelectorAll("input[name=s]:checked")].map((box) => box.value));
    const allowed = (element) => {
      const status = element.dataset.s;
      return wanted.has(status === "note" || status === "skip" ? "pass" : status);
    };
    const named = hosts.map((host) => host.includes(words));
    const ofNode = (row) => numbers(row.dataset.n).some((number) => named[number]);
    rows.forEach((row) => off(row, !allowed(row) || (words !== "" && !ofNode(row) && !textOf(row).includes(words))));
    let left = 0;
    nodes.forEach((node, number) => {
      const match = allowed(node) && (words === "" || named[number] || textOf(node).includes(words));
      off(node, !match);
      left += match ? 1 : 0;
    });
    checks.forEach((check) => off(check, !allowed(check) || (words !== "" && !textOf(check).includes(words))));
    shown.textContent = `${left} of ${nodes.length} nodes`;
  };
  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(apply, 60);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = nodes.length === 0;
  shown.textContent = `${nodes.length} of ${nodes.length} nodes`;

  // Equal nodes share a drawing: it is copied when a node is opened.
  const copied = (node) => {
    const line = node.querySelector("p[data-d]");
    if (!line || !node.open) return;
    const copy = document.getElementById(`d${line.dataset.d}`).closest(".scroll").cloneNode(true);
    copy.firstElementChild.removeAttribute("id");
    copy.setAttribute("aria-label", `Drawing of ${node.dataset.h}`);
    line.removeAttribute("data-d");
    line.before(copy);
  };
  nodes.forEach((node) => {
    node.addEventListener("toggle", () => copied(node));
    copied(node);
  });

  const open = () => {
    const target = location.hash ? document.getElementById(location.hash.slice(1)) : null;
    for (let one = target; one; one = one.parentElement) {
      if (one.tagName === "DETAILS") one.open = true;
      off(one, false);
    }
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", open);
  open();

  const columns = document.getElementById("columns");
  const readout = document.getElementById("cell");
  if (columns) {
    const list = columns.dataset.columns.split(";").filter(Boolean).map((text) => text.split(","));
    const at = (event) => {
      const svg = event.target.closest("svg.cells");
      if (!svg) return null;
      const x = event.clientX - svg.getBoundingClientRect().left;
      const column = list.find(([left, width]) => x >= Number(left) && x < Number(left) + Number(width));
      return column ? { column, row: svg.closest("tr") } : null;
    };
    const table = columns.closest("table");
    table.addEventListener("mousemove", (event) => {
      const found = at(event);
      if (found) readout.textContent = `${found.column[3]} on ${found.row.querySelector("th").textContent.trim()}`;
    });
    table.addEventListener("click", (event) => {
      const found = at(event);
      if (found) location.hash = `c${found.column[2]}`;
    });
  }
})();
