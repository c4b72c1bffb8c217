/* Search from a folder. Browsers refuse to start a Worker for a page that was opened as file://. This one runs the
   worker's script in a hidden frame instead, where it finds the same names: `postMessage`, messages, `importScripts`.
   It takes the place of the script that mkdocs-material's offline plugin would load from the network (mkdocs.yml). */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.appendChild(this.#frame);
      const inside = this.#frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = new URL(source, url);
          script.onload = resolve;
          script.onerror = () => reject(new Error(`${source} could not be loaded`));
          inside.document.head.appendChild(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.#ready = load(url);
      this.#ready.catch((error) => this.dispatchEvent(new ErrorEvent("error", { error, message: error.message })));
    }

    postMessage(data) {
      const inside = this.#frame.contentWindow;
      this.#ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data }))).catch(() => {});
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
