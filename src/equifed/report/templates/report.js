"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // -- the table of clients ------------------------------------------------------------------
  const body = document.querySelector("#clients tbody");
  const heads = [...document.querySelectorAll("#clients th[data-key]")];
  const search = document.getElementById("search");
  const choice = document.getElementById("method");
  const shown = document.getElementById("shown");
  const names = data.clients.map((name) => name.toLowerCase());
  let order = { key: "value", down: !data.higher };
  let rows = [];

  function current() {
    return data.methods[choice ? Number(choice.value) : 0];
  }

  function cell(text, name) {
    const td = document.createElement("td");
    td.textContent = text;
    if (name) td.className = name;
    return td;
  }

  function fill() {
    const columns = current().columns;  // numbers are written once, by what made the page
    rows = data.clients.map((name, i) => {
      const tr = document.createElement("tr");
      tr.append(cell(name, "first"));
      for (const key of data.keys) {
        const column = columns[key];
        const td = cell(column ? column.text[i] : "–");
        if (column && column.notes[i]) {
          const span = document.createElement("span");
          span.className = "change";
          span.textContent = column.notes[i];
          td.append(span);
        }
        tr.append(td);
      }
      return tr;
    });
    arrange();
  }

  function keyOf(i) {
    if (order.key === "client") return data.clients[i];
    const column = current().columns[order.key];
    return column ? column.value[i] : null;
  }

  function arrange() {
    const wanted = search.value.trim().toLowerCase();
    const list = rows.map((_, i) => i).filter((i) => names[i].includes(wanted));
    const sign = order.down ? -1 : 1;
    const compare = order.key === "client"
      ? (a, b) => a.localeCompare(b, "en", { numeric: true }) : (a, b) => a - b;
    list.sort((i, j) => {
      const [a, b] = [keyOf(i), keyOf(j)];
      if (a === null || b === null) return (a === null) - (b === null);  // unknown comes last
      return sign * compare(a, b) || i - j;
    });
    body.replaceChildren(...list.map((i) => rows[i]));
    const total = rows.length.toLocaleString("en");
    const noun = rows.length === 1 ? " client" : " clients";
    shown.textContent = (list.length === rows.length ? total
      : list.length.toLocaleString("en") + " of " + total) + noun;
    for (const head of heads) {
      const mine = head.dataset.key === order.key;
      head.setAttribute("aria-sort", mine ? (order.down ? "descending" : "ascending") : "none");
    }
  }

  if (body && data.methods.length) {
    for (const head of heads) {
      head.firstElementChild.addEventListener("click", () => {
        const key = head.dataset.key;
        order = { key, down: order.key === key ? !order.down : false };
        arrange();
      });
    }
    search.addEventListener("input", arrange);
    if (choice) choice.addEventListener("change", fill);
    fill();
  }

  // -- tables that are wider than the page --------------------------------------------------------
  function mark() {
    for (const box of document.querySelectorAll(".scroll")) {
      box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
    }
  }
  mark();
  window.addEventListener("resize", mark);
  for (const box of document.querySelectorAll("details")) box.addEventListener("toggle", mark);

  window.addEventListener("beforeprint", () => {
    for (const box of document.querySelectorAll("details")) box.open = true;  // paper has no clicks
  });

  // -- names on hover ------------------------------------------------------------------------
  const tip = document.getElementById("tip");
  const around = [[0, 0], [3, 0], [-3, 0], [0, 3], [0, -3], [5, 5], [-5, -5], [5, -5], [-5, 5]];
  let lit = null;

  function words(mark) {
    if (mark.dataset.tip) return mark.dataset.tip;
    const i = Number(mark.dataset.c);
    const method = data.methods[Number(mark.dataset.m)];
    if (!method) return data.clients[i];
    const column = method.columns.value;
    let text = data.clients[i] + ": " + column.text[i];
    if (column.notes[i]) text += " (" + column.notes[i] + ")";
    return data.methods.length > 1 ? text + ", " + method.name : text;
  }

  function point(event) {
    let mark = null;
    for (const [dx, dy] of around) {
      const under = document.elementFromPoint(event.clientX + dx, event.clientY + dy);
      mark = under && under.closest("[data-c], [data-tip]");
      if (mark) break;
    }
    if (lit && lit !== mark) lit.classList.remove("lit");
    lit = mark;
    tip.hidden = !mark;
    if (!mark) return;
    if (mark.tagName === "circle") mark.classList.add("lit");
    tip.textContent = words(mark);
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < window.innerHeight;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
  }

  for (const drawing of document.querySelectorAll("figure > svg")) {
    drawing.addEventListener("pointermove", point);
    drawing.addEventListener("pointerdown", point);
    drawing.addEventListener("pointerleave", () => {
      tip.hidden = true;
      if (lit) lit.classList.remove("lit");
      lit = null;
    });
  }
})();
