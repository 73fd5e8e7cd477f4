"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const names = read("names");
  const data = read("data");
  const rows = data.implementations.map((row, i) => ({ ...row, color: names.colors[i], label: names.labels[i], shown: true }));
  const drawn = rows.filter((row) => row.timeline);
  const timed = rows.filter((row) => row.seconds);
  const state = { share: false, owner: "" }; // owner: the name of the one that is shown by owner, "" for all as lines
  const RIGHT = 14, PLOT = 330, STRIP = 20;
  let LEFT = 150; // room for the names; less on a narrow screen, where they are cut

  const most = (values, otherwise) => values.reduce((a, b) => Math.max(a, b), otherwise);
  const short = (text) => (text.length > LEFT / 6.8 ? `${text.slice(0, LEFT / 6.8 - 1)}…` : text);
  const unit = names.unit; // its name, and how many of it are a GiB
  const number = (value) =>
    value === 0 ? "0"
      : Math.abs(value) >= 0.1 ? value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })
      : value.toPrecision(2);
  const size = (gib) => number(gib * unit[1]);
  const seconds = (ms) => (ms < 1000 ? `${number(ms)} ms` : `${number(ms / 1000)} s`);

  function html(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style") element.style.cssText = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }
  function svg(tag, attributes = {}, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  const swatch = (color) => html("span", { class: "swatch", style: `background:${color}` });
  const legend = (items) =>
    html("div", { class: "legend" }, ...items.map((one) => html("span", {}, swatch(one.color), one.text)));

  // ---- what is shown when the pointer is over something
  const tip = document.getElementById("tip");
  function show(event, ...content) {
    tip.replaceChildren(...content);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 18 + box.width > window.innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX - box.width - 14 : event.clientX + 16)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - box.height - 4))}px`;
  }
  const hide = () => { tip.hidden = true; };
  const table = (lines) => html("table", {}, ...lines.map((cells) =>
    html("tr", {}, ...cells.map((cell) => html("td", {}, ...[].concat(cell))))));

  // ---- scales
  function ticks(limit, count) {
    const rough = limit / count;
    const power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough) || power;
    const found = [];
    for (let i = 0; i * step <= limit * 1.0001; i++) found.push(i * step);
    return found;
  }
  const plain = (value) => value.toLocaleString("en", { maximumSignificantDigits: 6 });
  const end = (row) => (row.segments.length ? row.segments[row.segments.length - 1].end_ms : 1);
  function last(sorted, value) { // the index of the last that is not above value
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (sorted[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  }

  function timeline() {
    const place = document.getElementById("timeline");
    const one = drawn.find((row) => row.name === state.owner);
    const shown = one ? [one] : drawn.filter((row) => row.shown);
    const width = Math.max(place.clientWidth, 320), inner = width - LEFT - RIGHT;
    const height = 12 + PLOT + 40 + STRIP * shown.length + 8;
    const top = most(shown.map((row) => row.peak.gib * unit[1]), 0) * 1.1 || 1;
    const longest = most(shown.map(end), 0) || 1;
    const limit = state.share ? 100 : longest;
    const toX = (row, ms) => LEFT + (state.share ? ms / end(row) : ms / longest) * inner;
    const toY = (value) => 12 + PLOT * (1 - value / top);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "memory over time" });

    for (const tick of ticks(top, 7)) {
      picture.append(
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: toY(tick), y2: toY(tick) }),
        svg("text", { class: "axis", x: LEFT - 8, y: toY(tick) + 4, "text-anchor": "end" }, plain(tick)));
    }
    for (const tick of ticks(limit, Math.max(3, inner / 100))) {
      const x = LEFT + (tick / limit) * inner;
      picture.append(
        svg("line", { class: "grid", x1: x, x2: x, y1: 12, y2: 12 + PLOT }),
        svg("text", { class: "axis", x, y: PLOT + 27, "text-anchor": "middle" }, plain(tick)));
    }
    picture.append(
      svg("text", { class: "axis", x: width - RIGHT, y: PLOT + 41, "text-anchor": "end" },
        state.share ? "share of the step, %" : "time of a step, ms"),
      svg("text", { class: "axis", transform: `translate(${LEFT - 56} ${12 + PLOT / 2}) rotate(-90)`, "text-anchor": "middle" },
        `memory of tensors, ${unit[0]}`));

    if (one) {
      const { ms, owners } = one.timeline;
      let under = ms.map(() => 0);
      for (const owner of names.owners) {
        const above = under.map((value, i) => value + Math.max(0, owners[owner.id][i]) * unit[1]);
        let path = "";
        ms.forEach((t, i) => {
          const next = i + 1 < ms.length ? ms[i + 1] : end(one);
          path += `${i ? "L" : "M"}${toX(one, t).toFixed(1)} ${toY(above[i]).toFixed(1)}H${toX(one, next).toFixed(1)}`;
        });
        for (let i = ms.length - 1; i >= 0; i--) {
          const next = i + 1 < ms.length ? ms[i + 1] : end(one);
          path += `L${toX(one, next).toFixed(1)} ${toY(under[i]).toFixed(1)}H${toX(one, ms[i]).toFixed(1)}`;
        }
        picture.append(svg("path", { d: `${path}Z`, fill: owner.color }));
        under = above;
      }
    } else {
      for (const row of shown) {
        const { ms, gib } = row.timeline;
        let path = `M${toX(row, 0)} ${toY(gib[0] * unit[1])}`;
        ms.forEach((t, i) => { path += `H${toX(row, t).toFixed(1)}V${toY(gib[i] * unit[1]).toFixed(1)}`; });
        path += `H${toX(row, end(row)).toFixed(1)}`;
        picture.append(svg("path", { d: path, fill: "none", stroke: row.color, "stroke-width": 1.5, "stroke-linejoin": "round" }));
      }
    }
    for (const row of shown) {
      const x = toX(row, row.peak.ms), y = toY(row.peak.gib * unit[1]);
      picture.append(svg("circle", { cx: x, cy: y, r: 4, fill: row.color, stroke: "#fff" }));
      if (row.failed) {
        const side = x > width - 100 ? "end" : x < LEFT + 60 ? "start" : "middle";
        picture.append(svg("text", { x, y: y - 8, "text-anchor": side }, "out of memory"));
      }
    }
    shown.forEach((row, i) => {
      const y = 12 + PLOT + 46 + STRIP * i;
      for (const part of row.segments) {
        const x = toX(row, part.begin_ms), wide = toX(row, part.end_ms) - x;
        const kind = names.kinds.find((k) => k.id === part.kind);
        picture.append(svg("rect", { x, y, width: Math.max(wide, 0.3), height: STRIP - 5, fill: kind.color }));
        if (wide > 4) picture.append(svg("rect", { x, y, width: 0.7, height: STRIP - 5, fill: "#fff" }));
        if (part.layer !== null && wide > 13) {
          picture.append(svg("text", { class: "small on-dark", x: x + wide / 2, y: y + 11, "text-anchor": "middle" }, `${part.layer}`));
        }
      }
      for (const [begin, end_ms, text] of runs(row, toX)) {
        const middle = (toX(row, begin) + toX(row, end_ms)) / 2, half = 2.7 * text.length;
        if (toX(row, end_ms) - toX(row, begin) < 2.2 * half) continue;
        picture.append(
          svg("rect", { x: middle - half, y: y + 1, width: 2 * half, height: STRIP - 7, fill: "#fff", opacity: 0.85 }),
          svg("text", { class: "small", x: middle, y: y + 11, "text-anchor": "middle" }, text));
      }
      picture.append(svg("text", { x: LEFT - 14, y: y + 11, "text-anchor": "end" }, short(row.label)));
      picture.append(svg("rect", { x: LEFT - 9, y, width: 4, height: STRIP - 5, fill: row.color }));
    });

    const cross = svg("line", { class: "cross", y1: 12, y2: height - 8, visibility: "hidden" });
    const cover = svg("rect", { x: LEFT, y: 0, width: inner, height, fill: "transparent" });
    cover.addEventListener("mousemove", (event) => {
      const box = picture.getBoundingClientRect();
      const x = ((event.clientX - box.left) * width) / box.width;
      cross.setAttribute("x1", x); cross.setAttribute("x2", x); cross.setAttribute("visibility", "visible");
      const part = Math.min(1, Math.max(0, (x - LEFT) / inner));
      show(event, moment(shown, part, longest, one));
    });
    cover.addEventListener("mouseleave", () => { cross.setAttribute("visibility", "hidden"); hide(); });
    picture.append(cross, cover);
    place.replaceChildren(picture, ...(one ? [legend(names.owners)] : []), legend(used()));
  }
  function runs(row, toX) { // neighbouring layers, all forward or all backward, that have no room for numbers
    const found = [];
    for (const [kinds, name] of [[["forward"], "forward"], [["recompute", "backward"], "backward"]]) {
      const run = row.segments.filter((part) => kinds.includes(part.kind) && part.layer !== null);
      if (!run.length || run.some((part) => toX(row, part.end_ms) - toX(row, part.begin_ms) > 13)) continue;
      const last = run[run.length - 1];
      found.push([run[0].begin_ms, last.end_ms, `${name} of layers ${run[0].layer} to ${last.layer}`]);
    }
    return found;
  }
  const used = () => names.kinds.filter((kind) => drawn.some((row) => row.segments.some((s) => s.kind === kind.id)));

  function moment(shown, part, longest, one) {
    const lines = [];
    for (const row of shown) {
      const ms = state.share ? part * end(row) : part * longest;
      if (ms > end(row)) { lines.push([[swatch(row.color), ` ${row.label}`], "", "its step has ended"]); continue; }
      const at = last(row.timeline.ms, ms);
      const phase = row.segments.find((s) => ms < s.end_ms) || row.segments[row.segments.length - 1];
      lines.push([[swatch(row.color), ` ${row.label}`], `${size(row.timeline.gib[at])} ${unit[0]}`, phase ? phase.name : ""]);
      if (one) {
        for (const owner of [...names.owners].reverse()) {
          const gib = row.timeline.owners[owner.id][at];
          if (gib) lines.push([[swatch(owner.color), ` ${owner.text}`], size(gib), ""]);
        }
      }
    }
    const head = state.share ? `${number(part * 100)} %` : seconds(part * longest);
    return html("div", {}, html("b", {}, head), table(lines));
  }

  function bars(id, list, parts, total, end_text) {
    const place = document.getElementById(id);
    const width = Math.max(place.clientWidth, 320), narrow = width < 600, left = LEFT, tall = 26;
    const right = narrow ? 80 : 210;
    const scale = (width - left - right) / (most(list.map(total), 0) || 1);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${tall * list.length + 4}`, role: "img", "aria-label": id });
    list.forEach((row, i) => {
      let x = left;
      picture.append(svg("text", { x: left - 14, y: tall * i + 17, "text-anchor": "end" }, short(row.label)));
      picture.append(svg("rect", { x: left - 9, y: tall * i + 4, width: 4, height: tall - 7, fill: row.color }));
      for (const [name, color, value, said] of parts(row)) {
        const wide = value * scale;
        if (wide <= 0) continue;
        const bar = svg("rect", { x, y: tall * i + 4, width: wide, height: tall - 7, fill: color });
        bar.addEventListener("mousemove", (event) => show(event, html("b", {}, row.label), table([[[swatch(color), ` ${name}`], said]])));
        bar.addEventListener("mouseleave", hide);
        picture.append(bar);
        x += wide;
      }
      picture.append(svg("text", { x: x + 8, y: tall * i + 17 }, narrow ? end_text(row).split(", ")[0] : end_text(row)));
    });
    place.replaceChildren(picture);
  }

  function fill(id, head, lines) { // a line: title, texts, the title's colour, whether it is a total
    const element = document.getElementById(id);
    const titled = (title, color) => (color ? [swatch(color), ` ${title}`] : [title]);
    element.replaceChildren(html("tr", {}, ...head.map(([title, color]) => html("th", {}, ...titled(title, color)))),
      ...lines.map(([title, texts, color, total]) => html("tr", total ? { class: "total" } : {},
        html("td", {}, ...titled(title, color)), ...texts.map((text) => html("td", {}, text)))));
    element.hidden = !lines.length;
  }
  function sheet(name, list) {
    const { head, lines } = names.tables[name];
    fill(`${name}-table`, [[head], ...list.map((row) => [row.label, row.color])], list.length ? lines : []);
  }

  function peaks() {
    const items = (row) => names.owners.map((o) => [o.text, o.color, row.peak.owners_gib[o.id], `${size(row.peak.owners_gib[o.id])} ${unit[0]}`]);
    bars("peaks", drawn, items, (row) => row.peak.gib, (row) => `${size(row.peak.gib)} ${unit[0]}, ${row.peak.phase}`);
    document.getElementById("peaks").append(legend(names.owners));
  }

  function times() {
    const items = (row) => names.kinds.map((k) => [k.text, k.color, row.time_by_kind_ms[k.id], seconds(row.time_by_kind_ms[k.id])]);
    const whole = (row) => names.kinds.reduce((sum, k) => sum + row.time_by_kind_ms[k.id], 0);
    bars("times", timed, items, whole, (row) => `${seconds(row.seconds * 1000)}${row.mfu ? `, MFU ${(100 * row.mfu).toFixed(1)}%` : ""}`);
    document.getElementById("times").append(legend(used()));
  }

  function largest() {
    const cells = (tag, [first, gib, ...words]) => html("tr", {}, html(tag, {}, ...[].concat(first)), html(tag, {}, gib),
      ...words.map((word) => html(tag, { class: "text" }, word)));
    document.getElementById("largest").replaceChildren(...drawn.map((row, i) => {
      const [[title, ...head], ...blocks] = names.largest[i];
      return html("div", { class: "scroll" }, html("table", {},
        cells("th", [[swatch(row.color), ` ${row.label}: ${title}`], ...head]), ...blocks.map((block) => cells("td", block))));
    }));
  }

  function cards() {
    const card = (row) => html("div", { class: "card", style: `border-left-color:${row.color}` },
      html("b", {}, row.label),
      row.failed ? html("div", { class: "failed" }, row.failed)
        : html("div", {}, html("div", { class: "big" }, `${size(row.peak.gib)} ${unit[0]}`),
          html("div", {}, `${seconds(row.seconds * 1000)} a step, ${Math.round(row.tokens_per_s).toLocaleString("en")} tokens/s`)));
    document.getElementById("results").replaceChildren(html("div", { class: "card-row" }, ...rows.map(card)));
  }

  function controls() {
    const boxes = drawn.map((row) => html("label", {},
      Object.assign(html("input", { type: "checkbox", onchange: (e) => { row.shown = e.target.checked; timeline(); } }), { checked: true }),
      swatch(row.color), row.label));
    const view = html("select", { id: "view", onchange: (e) => {
      state.owner = e.target.value;
      for (const box of boxes) box.firstChild.disabled = Boolean(state.owner);
      timeline();
    } }, html("option", { value: "" }, "all, one over the other"),
      ...drawn.map((row) => html("option", { value: row.name }, `${row.label}: by owner`)));
    const share = html("label", {}, html("input", { type: "checkbox", id: "share", onchange: (e) => { state.share = e.target.checked; timeline(); } }),
      "stretch each step to the same width");
    document.getElementById("controls").replaceChildren(...boxes, view, share);
  }

  function about() {
    const [what, where] = names.title.split("\n");
    document.title = `lowtide profile: ${what}`;
    document.getElementById("title").textContent = what;
    document.getElementById("where").textContent = `${where} · ${data.date}`;
    document.getElementById("command").textContent = [...(data.included || []), data.command].join("\n");
    const told = { ...data.machine, commit: data.commit, ...data.settings };
    const lines = Object.entries(told).filter(([, value]) => value !== null).map(([name, value]) => [name.replaceAll("_", " "), [String(value)]]);
    for (const row of rows) {
      if (row.note) lines.push([row.name, [row.note]]);
      for (const [kind, file] of Object.entries(row.files || {})) lines.push([`${row.name}, ${kind}`, [file]]);
    }
    fill("about", [[""], [""]], lines);
    for (const cell of document.querySelectorAll("#about td:last-child")) cell.className = "text";
  }

  function draw() { LEFT = window.innerWidth < 640 ? 96 : 150; timeline(); peaks(); times(); }
  about(); cards(); controls(); draw(); largest();
  sheet("peak", drawn); sheet("layer", drawn); sheet("time", timed);
  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 100); });
  document.body.dataset.ready = "true";
})();
