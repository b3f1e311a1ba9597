"use strict";
(() => {
  const lamp = document.getElementById("live");
  let version = lamp.dataset.version, busy = false;
  const say = (text, off) => { lamp.querySelector("span").textContent = text; lamp.classList.toggle("off", Boolean(off)); };
  const name = (details) => details.querySelector("summary").textContent.trim();

  async function look() {
    if (busy || document.hidden) return;
    busy = true;
    try {
      const now = await (await fetch("version", { cache: "no-store" })).text();
      if (now !== version) {
        const text = await (await fetch("./", { cache: "no-store" })).text();
        const next = new DOMParser().parseFromString(text, "text/html"), main = document.querySelector("main");
        const open = new Map([...main.querySelectorAll("details")].map((d) => [name(d), d.open]));
        const boxes = [...main.querySelectorAll(".scroll, figure.wide .drawing")].map((b) => b.scrollLeft);
        const fresh = next.querySelector("main"), [x, y] = [scrollX, scrollY];
        for (const d of fresh.querySelectorAll("details")) if (open.has(name(d))) d.open = open.get(name(d));
        main.replaceWith(document.adoptNode(fresh));
        [...fresh.querySelectorAll(".scroll, figure.wide .drawing")].forEach((b, i) => { b.scrollLeft = boxes[i] || 0; });
        document.title = next.title;
        version = next.getElementById("live").dataset.version;
        lamp.dataset.version = version;
        window.gossamerTimelines();
        scrollTo({ left: x, top: y, behavior: "instant" });
      }
      say("live, as of " + new Date().toLocaleTimeString());
    } catch (error) {
      say("gossamer watch does not answer any more", true);
    }
    busy = false;
  }
  say("live");
  setInterval(look, 1500);
  document.addEventListener("visibilitychange", look);
})();
