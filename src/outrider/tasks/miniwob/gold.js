// At the end of a page whose known solution is tried: makes the title a list of what the mouse and the keyboard do.
(function () {
  const query = () => document.querySelector("#query").textContent;
  const quoted = () => [...query().matchAll(/"([^"]*)"/g)].map((found) => found[1]);
  const typed = (text) => "type " + text;
  function middle(what) {
    const element = typeof what === "string" ? document.querySelector(what) : what;
    const box = element.getBoundingClientRect();
    const pixel = (length) => Math.round(length * window.devicePixelRatio);
    return pixel(box.left + box.width / 2) + " " + pixel(box.top + box.height / 2);
  }
  const clicked = (what) => "click " + middle(what);
  const dragged = (what, where) => "drag " + middle(what) + " " + middle(where);
  const reading = (selector, text) =>
    [...document.querySelectorAll(selector)].find((element) => element.textContent.trim() === text);
  const boxes = (names) => names.map((name) => clicked(reading("#boxes label", name).querySelector("input")));
  const selected = () => query().match(/^Select (.*) and click Submit/)[1].split(", ");

  const solutions = {
    "click-button": () => [clicked(reading("#area button", quoted()[0]))],
    "click-checkboxes": () => [...boxes(selected().filter((name) => name !== "nothing")), clicked("#subbtn")],
    "click-dialog": () => [clicked(".ui-dialog-titlebar-close")],
    "click-option": () => [...boxes(selected()), clicked("#subbtn")],
    "click-tab": () => [clicked(reading("#area ul a", query().match(/Tab #\d/)[0]))],
    "click-test": () => [clicked("#subbtn")],
    "drag-box": () => [dragged("#draggableSmall", "#draggableLarge"), clicked("#subbtn")],
    "enter-text": () => [clicked("#tt"), typed(quoted()[0]), clicked("#subbtn")],
    "focus-text": () => [clicked("#tt")],
    "login-user": () => {
      const [user, password] = quoted();
      return [clicked("#username"), typed(user), clicked("#password"), typed(password), clicked("#subbtn")];
    },
  };

  window.addEventListener("load", () => { document.title = "miniwob-gold " + solutions[TASK]().join(";"); });
})();
