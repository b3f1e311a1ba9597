"use strict";
(() => {
  const kept = new Map(); // what is seen of each figure, in seconds: it stays when a page that is watched brings a newer one
  let redraws = [];
  const height = 26, top = 6, axis = 24;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const units = [[7200, 3600, "h"], [120, 60, "min"], [1, 1, "s"], [0, 0.001, "ms"]];
  const unitOf = (longest) => units.find((u) => Math.abs(longest) >= u[0]);
  function time(s, unit = unitOf(s), fine = s) {
    const value = s / unit[1], small = Math.abs(fine / unit[1]);
    return value.toFixed(small >= 10 ? 1 : small >= 0.1 ? 2 : 3) + " " + unit[2];
  }

  function step(span, most) {
    const raw = span / most, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  }

  function show(figure) {
    const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    const box = figure.querySelector(".zoom"), canvas = box.querySelector("canvas"), said = box.querySelector("output");
    data.rows = data.rows.map((told) => {
      const spans = new Array(told.length);
      let end = 0, round = 0;
      for (let i = 0; i < told.length; i += 4) {
        spans[i] = told[i]; spans[i + 1] = end + told[i + 1]; spans[i + 2] = told[i + 2];
        end = spans[i + 1] + told[i + 2];
        spans[i + 3] = round += told[i + 3];
      }
      return spans;
    });
    const key = figure.dataset.key, n = data.names.length, least = Math.max(20, data.end / 50000);
    const few = data.rounds.length <= 12 ? data.end : data.rounds[8][1];
    const before = kept.get(key), unit = (s) => (s - data.begin_s) / data.unit_s;
    const view = before ? { a: before.whole ? 0 : unit(before.from), b: before.whole ? data.end : unit(before.to) } : { a: 0, b: few };
    let left = 0, width = 0, picked = null;
    box.hidden = false;
    box.querySelector(".regions").replaceChildren(...data.kinds.map(([, name, color]) => {
      const item = document.createElement("span"), dot = document.createElement("i");
      dot.className = "dot sq"; dot.style.background = `var(--c${color.slice(1)},${color})`;
      item.append(dot, name);
      return item;
    }));

    const x = (t) => left + ((t - view.a) / (view.b - view.a)) * (width - left);
    const t = (px) => view.a + ((px - left) / (width - left)) * (view.b - view.a);

    function move(a, b) {
      const span = Math.min(Math.max(b - a, least), data.end);
      const first = Math.min(Math.max(a, 0), data.end - span);
      view.a = first; view.b = first + span;
      draw();
    }
    function zoom(by, at) {
      const mid = at === undefined ? (view.a + view.b) / 2 : at;
      move(mid - (mid - view.a) * by, mid + (view.b - mid) * by);
    }
    const pan = (by) => move(view.a + by * (view.b - view.a), view.b + by * (view.b - view.a));

    function draw() {
      width = box.clientWidth;
      if (!width) return;
      const tall = top + n * height + axis, dots = window.devicePixelRatio || 1;
      canvas.width = Math.round(width * dots); canvas.height = Math.round(tall * dots);
      canvas.style.height = tall + "px";
      const g = canvas.getContext("2d");
      g.scale(dots, dots);
      g.font = "12px system-ui, sans-serif";
      left = Math.min(width * 0.3, Math.max(...data.names.map((name) => g.measureText(name).width)) + 10);
      const ink = css("--ink"), soft = css("--soft"), line = css("--line");
      const every = step((view.b - view.a) * data.unit_s, Math.max(2, (width - left) / 90));
      g.textBaseline = "middle"; g.lineWidth = 1;
      g.textAlign = "center";
      const from = data.begin_s + view.a * data.unit_s, to = data.begin_s + view.b * data.unit_s;
      for (let s = Math.ceil(from / every) * every; s <= to; s += every) {
        const px = Math.round(x((s - data.begin_s) / data.unit_s)) + 0.5;
        g.strokeStyle = line; g.beginPath(); g.moveTo(px, top); g.lineTo(px, tall - axis + 4); g.stroke();
        g.fillStyle = soft;
        const text = time(s, unitOf(to), every * 10), half = g.measureText(text).width / 2;
        if (px + half < width && px - half > left - 30) g.fillText(text, px, tall - axis / 2 + 2);
      }
      g.strokeStyle = soft; g.setLineDash([3, 3]);
      const shown = data.rounds.filter((r) => r[1] > view.a && r[1] < view.b);
      if (shown.length < 40) for (const [, at] of shown) {
        const px = Math.round(x(at)) + 0.5;
        g.beginPath(); g.moveTo(px, top); g.lineTo(px, tall - axis); g.stroke();
      }
      g.setLineDash([]);
      let drawn = 0;
      const colors = data.kinds.map(([, , color]) => css("--c" + color.slice(1)) || color);
      for (let row = 0; row < n; row++) {
        const spans = data.rows[row], y = top + row * height;
        for (let i = 0; i < spans.length; i += 4) {
          const a = spans[i + 1], b = a + spans[i + 2];
          if (b < view.a || a > view.b) continue;
          drawn++;
          const send = data.kinds[spans[i]][0] === "send";
          const px = Math.max(left, x(a)), w = Math.max(0.6, Math.min(width, x(b)) - px);
          g.fillStyle = colors[spans[i]];
          g.fillRect(px, y + (send ? 18 : 2), w, send ? 5 : 16);
        }
        g.textAlign = "right"; g.fillStyle = ink;
        let name = data.names[row];
        while (name.length > 3 && g.measureText(name).width > left - 6) name = name.slice(0, -2) + "…";
        g.fillText(name, left - 6, y + 11);
      }
      if (picked) {
        g.strokeStyle = ink; g.lineWidth = 2;
        g.strokeRect(Math.max(left, x(picked.a)), top + picked.row * height + 1, Math.max(2, x(picked.b) - Math.max(left, x(picked.a))), 18);
      }
      const begun = data.rounds.filter((r) => r[1] <= view.b), first = begun.findLast((r) => r[1] <= view.a) || begun[0], last = begun[begun.length - 1];
      const mark = first ? (first[0] === last[0] ? `, round ${first[0]}` : `, rounds ${first[0]} to ${last[0]}`) : "";
      box.querySelector(".range").textContent = `${time(from)} to ${time(to)}${mark}`;
      kept.set(key, { from, to, whole: view.a === 0 && view.b === data.end });
      canvas.dataset.from = from; canvas.dataset.to = to; canvas.dataset.drawn = drawn;
    }

    function pick(event) {
      const edge = canvas.getBoundingClientRect(), px = event.clientX - edge.left, row = Math.floor((event.clientY - edge.top - top) / height);
      picked = null;
      said.textContent = data.note;
      if (row >= 0 && row < n && px > left) {
        const at = t(px), slack = (2 / (width - left)) * (view.b - view.a), low = event.clientY - edge.top - top - row * height > 17;
        const spans = data.rows[row];
        let best = null;
        for (let i = 0; i < spans.length; i += 4) {
          const send = data.kinds[spans[i]][0] === "send";
          if (send === low && spans[i + 1] - slack <= at && at <= spans[i + 1] + spans[i + 2] + slack) best = i;
        }
        if (best !== null) {
          const a = spans[best + 1], b = a + spans[best + 2];
          picked = { row, a, b };
          said.textContent = `${data.names[row]}: ${data.kinds[spans[best]][1]}, ${time((b - a) * data.unit_s)}, in round ${spans[best + 3]}, from ${time(data.begin_s + a * data.unit_s)} on`;
        }
      }
      draw();
    }

    const fingers = new Map();
    canvas.addEventListener("pointerdown", (e) => {
      fingers.set(e.pointerId, e.clientX);
      canvas.setPointerCapture(e.pointerId);
      if (e.pointerType !== "mouse") pick(e);
    });
    canvas.addEventListener("pointermove", (e) => {
      if (!fingers.has(e.pointerId)) { if (e.pointerType === "mouse") pick(e); return; }
      const before = [...fingers.values()], edge = canvas.getBoundingClientRect().left;
      fingers.set(e.pointerId, e.clientX);
      const now = [...fingers.values()];
      if (now.length === 1) {
        const by = ((before[0] - now[0]) / (width - left)) * (view.b - view.a);
        move(view.a + by, view.b + by);
      } else {
        const wide = (p) => Math.max(8, Math.abs(p[0] - p[1]));
        zoom(wide(before) / wide(now), t((now[0] + now[1]) / 2 - edge));
      }
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) canvas.addEventListener(name, (e) => fingers.delete(e.pointerId));
    canvas.addEventListener("pointerleave", (e) => { if (!fingers.size && e.pointerType === "mouse") { picked = null; said.textContent = data.note; draw(); } });
    canvas.addEventListener("wheel", (e) => {
      if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, t(e.clientX - canvas.getBoundingClientRect().left)); }
      else if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) { e.preventDefault(); pan(e.deltaX / width); }
    }, { passive: false });
    canvas.addEventListener("dblclick", (e) => zoom(0.4, t(e.clientX - canvas.getBoundingClientRect().left)));
    const keys = { ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => move(0, data.end) };
    canvas.addEventListener("keydown", (e) => { if (keys[e.key] && !e.ctrlKey && !e.metaKey) { e.preventDefault(); keys[e.key](); } });
    const acts = { in: () => zoom(0.5), out: () => zoom(2), left: () => pan(-0.5), right: () => pan(0.5), all: () => move(0, data.end) };
    for (const button of box.querySelectorAll("button")) button.addEventListener("click", acts[button.dataset.act]);
    said.textContent = data.note;
    new ResizeObserver(draw).observe(box);
    redraws.push(draw);
    draw();
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((draw) => draw()));
  window.gossamerTimelines = () => { redraws = []; for (const figure of document.querySelectorAll("figure[data-key]")) show(figure); };
  window.gossamerTimelines();
})();
