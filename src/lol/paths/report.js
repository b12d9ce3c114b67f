// Fills the panel with the blocks and weights of the text under the pointer or in focus. The page reads without it.
(() => {
  "use strict";
  const windows = JSON.parse(document.getElementById("windows").textContent);
  const panel = document.getElementById("panel");
  const common = document.getElementById("common");
  let shown = null;
  let token = null;

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const chip = (block) => {
    const made = element("span", "chip", block);
    made.style.setProperty("--chip", `var(--block-${block})`);
    return made;
  };
  const distribution = (block, probabilities) => {
    const bar = element("div", "distribution");
    probabilities.forEach((share, other) => {
      const part = element("span", other === block ? "ran" : "");
      part.style.flexGrow = share;
      part.style.setProperty("--chip", `var(--block-${other})`);
      bar.append(part);
    });
    return bar;
  };
  const view = () => {
    const chosen = document.querySelector(".views input:checked");
    return chosen && chosen.value !== "on" ? Number(chosen.value) : null;
  };
  const linesOf = (piece) => piece.dataset.lines.split(" ").map(Number);

  const mark = (piece) => {
    document.querySelectorAll(".piece.same").forEach((other) => other.classList.remove("same"));
    if (!piece) return;
    const depth = view();
    const line = depth === null ? null : linesOf(piece)[depth];
    for (const other of piece.parentElement.children) {
      if (other === piece || (line !== null && linesOf(other)[depth] === line)) other.classList.add("same");
    }
  };

  const show = (piece, index) => {
    if (piece === shown && index === token) return;
    shown = piece;
    token = index;
    mark(piece);
    panel.hidden = !piece;
    common.hidden = Boolean(piece);
    if (!piece) return;
    const start = Number(piece.dataset.start);
    const head = element("h3", "", `tokens ${start}–${start + piece.children.length - 1}`);
    const what = element("p", "note small token", index === null ? "\u00a0" : `token ${start + index}: `);
    if (index !== null) what.append(element("code", "", JSON.stringify(piece.children[index].textContent)));
    const table = element("table", "depths");
    const names = element("tr");
    for (const name of ["depth", "window", "block", "router’s probabilities", "weight"]) names.append(element("th", "", name));
    table.append(names);
    for (const number of linesOf(piece)) {
      const [depth, , from, to, block, weight, probabilities] = windows[number];
      const row = element("tr", depth === view() ? "now" : "");
      row.append(element("td", "number", depth), element("td", "number span", `${from}–${to - 1}`));
      const ran = element("td");
      ran.append(chip(block));
      const bar = element("td", "wide");
      bar.append(distribution(block, probabilities));
      row.append(ran, bar, element("td", "number", weight.toFixed(2)));
      table.append(row);
    }
    panel.replaceChildren(head, what, table);
  };

  const focused = () => {
    const active = document.activeElement;
    return active && active.classList.contains("piece") ? active : null;
  };
  const documents = document.querySelector(".documents");
  documents.addEventListener("mouseover", (event) => {
    const piece = event.target.closest(".piece");
    if (!piece) return;
    const at = event.target.closest("i");
    show(piece, at ? [...piece.children].indexOf(at) : null);
  });
  documents.addEventListener("mouseleave", () => show(focused(), null));
  documents.addEventListener("focusin", (event) => {
    const piece = event.target.closest(".piece");
    if (piece && piece !== shown) show(piece, null);
  });
  documents.addEventListener("focusout", () => setTimeout(() => focused() || show(null, null)));
  documents.addEventListener("click", (event) => event.target.closest(".piece")?.focus());
  documents.addEventListener("keydown", (event) => {
    const piece = event.target.closest(".piece");
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") document.activeElement.blur();
    if (!piece || !(event.key in steps)) return;
    event.preventDefault();
    const next = steps[event.key] > 0 ? piece.nextElementSibling : piece.previousElementSibling;
    if (!next) return;
    piece.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  const dim = (path) => {
    for (const piece of document.querySelectorAll(".piece")) {
      piece.classList.toggle("dim", path !== null && !piece.classList.contains(`p${path}`));
    }
  };
  for (const row of common.querySelectorAll("tr")) {
    row.addEventListener("mouseenter", () => dim(row.dataset.path));
    row.addEventListener("mouseleave", () => dim(null));
  }
  document.querySelector(".views").addEventListener("change", () => {
    const piece = shown;
    shown = null;
    show(piece, token);
  });
})();
