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

  function cell(text, name) {
    const td = document.createElement("td");
    td.textContent = text;
    if (name) td.className = name;
    return td;
  }

  function withLimits(column, i) {
    const td = cell(column.text[i]);
    if (column.limits[i]) {
      const span = document.createElement("span");
      span.className = "change";
      span.textContent = column.limits[i];
      td.append(span);
    }
    return td;
  }

  function meter(method, i, range) {
    const td = document.createElement("td");
    const [low, high] = [method.lower[i], method.upper[i]];
    if (low === null) { td.textContent = "–"; return td; }
    const place = (v) => 100 * (v - range[0]) / (range[1] - range[0] || 1);
    const box = document.createElement("span");
    const bar = document.createElement("b");
    const tick = document.createElement("i");
    box.className = "meter";
    bar.style.left = place(low) + "%";
    bar.style.width = place(high) - place(low) + "%";
    tick.style.left = place(method.value[i]) + "%";
    box.append(bar, tick);
    td.append(method.text.limits[i], box);
    return td;
  }

  function fill() {
    const method = data.methods[choice ? Number(choice.value) : 0];
    const lows = method.lower.filter((v) => v !== null);
    const highs = method.upper.filter((v) => v !== null);
    const range = [Math.min(...lows), Math.max(...highs)];
    rows = data.clients.map((name, i) => {
      const tr = document.createElement("tr");
      const text = method.text;  // numbers are written once, by the program that made the page
      tr.append(cell(name, "first"), cell(text.value[i]));
      if (data.limits) tr.append(meter(method, i, range));
      if (data.methods.length > 1) tr.append(cell(text.change[i]));
      for (const key of data.more) tr.append(withLimits(method.more[key], i));
      if (data.loss) tr.append(cell(text.loss[i]));
      tr.append(cell(data.n[i].toLocaleString("en")), cell(text.weight[i]),
        cell(text.participation[i]), cell(String(method.quarantines[i])));
      return tr;
    });
    arrange();
  }

  function keyOf(i) {
    const method = data.methods[choice ? Number(choice.value) : 0];
    if (order.key === "client") return data.clients[i];
    if (order.key === "n") return data.n[i];
    return (method.more[order.key] ? method.more[order.key].value : method[order.key])[i];
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

  // -- names on hover ------------------------------------------------------------------------
  const tip = document.getElementById("tip");
  const around = [[0, 0], [3, 0], [-3, 0], [0, 3], [0, -3], [5, 5], [-5, -5], [5, -5], [-5, 5]];
  let lit = null;

  function words(mark) {
    if (mark.dataset.tip) return mark.dataset.tip;
    const i = Number(mark.dataset.c);
    const method = data.methods[Number(mark.dataset.m)];
    if (!method) return data.clients[i];
    let text = data.clients[i] + ": " + method.text.value[i];
    if (method.lower[i] !== null) text += " (" + method.text.limits[i] + ")";
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
